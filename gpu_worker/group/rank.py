"""The program of a rank other than 0.

Its front starts it (rank_process), with a RankTask as its argument. It knows no store, no scheduler
and no sequence. It says RankWords on its standard output.
"""

import json
import os
import signal
import sys


def main() -> int:
    words = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no word
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the front decides
    told = sys.argv[1]
    try:
        from gpu_worker.group.rank_service import serve  # torch: there may be too little memory even for that

        serve(told, words)
    except Exception as error:  # the front says which rank failed, and why
        from octavo.request.errors import ServingError

        text = str(error) if isinstance(error, ServingError) else f"{type(error).__name__}: {error}"
        words.write(json.dumps({"rank": json.loads(told)["rank"], "failure": text}) + "\n")
        words.flush()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
