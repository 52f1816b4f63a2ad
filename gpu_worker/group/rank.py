"""The program of a rank other than 0: loads its share of the model, and computes it in each step of rank 0.

Its front starts it (rank_processes), with a RankTask as its argument. It knows no store, no scheduler
and no sequence. It says RankWords on its standard output.
"""

import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import asdict
from typing import Any, TextIO

from gpu_worker.group.rank_task import RankTask, RankUsage, RankWord
from gpu_worker.running.loading import load_runner
from octavo.request.errors import ServingError


class Speaker(logging.Handler):
    """Says the words of a rank. Its log goes to the front with them, which writes it in its own form."""

    def __init__(self, rank: int, words: TextIO) -> None:
        super().__init__(logging.WARNING)
        self._rank = rank
        self._words = words
        self._turn = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        self.say(level=record.levelno, line=record.getMessage())

    def say(self, **word: Any) -> None:
        with self._turn:
            self._words.write(RankWord(rank=self._rank, **word).to_json() + "\n")
            self._words.flush()

    def beat(self, task: RankTask) -> None:
        """Says for as long as the process lives that it does, and what it uses."""
        pause, team = threading.Event(), task.place().team()
        while not pause.wait(task.beat_s):
            self.say(usage=asdict(RankUsage.of_this_process(team.waited_s(team.rank))))


def serve(task: RankTask, speaker: Speaker) -> None:
    runner = load_runner(**task.options, place=task.place())
    info = runner.info
    speaker.say(numerics=info.numerics, num_blocks=info.num_blocks, host=socket.gethostname(), pid=os.getpid())
    threading.Thread(target=speaker.beat, args=(task,), name="beat", daemon=True).start()
    runner.serve()


def main() -> int:
    words = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no word
    task = RankTask.from_json(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the front decides
    speaker = Speaker(task.rank, words)
    logging.getLogger().addHandler(speaker)
    try:
        serve(task, speaker)
    except ServingError as error:
        speaker.say(failure=str(error))
        return 1
    except Exception as error:  # the front says which rank failed, and why
        speaker.say(failure=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
