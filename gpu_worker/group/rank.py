"""The program of a rank other than 0: loads its share of the model, and computes it in each step of rank 0.

Its front starts it, `python -m gpu_worker.group.rank`, with a line of JSON (RankTask). It knows no store, no scheduler
and no sequence, and ends with its front: the kernel kills it when the thread of the front that started it is gone.
"""

import ctypes
import logging
import os
import signal
import sys
from typing import TextIO

from gpu_worker.group.rank_task import RankTask, RankWord

PR_SET_PDEATHSIG = 1


class WordHandler(logging.Handler):
    """Sends the log to the front, which writes it in its own form."""

    def __init__(self, words: TextIO) -> None:
        super().__init__(logging.WARNING)
        self._words = words

    def emit(self, record: logging.LogRecord) -> None:
        say(self._words, RankWord(level=record.levelno, line=record.getMessage()))


def say(words: TextIO, word: RankWord) -> None:
    words.write(word.to_json() + "\n")
    words.flush()


def end_with_front(front_pid: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != front_pid:  # it had gone before
        os._exit(1)


def serve(task: RankTask, words: TextIO) -> None:
    from gpu_worker.running.loading import load_runner  # seconds: by then the rank ends with its front

    runner = load_runner(**task.options, place=task.place())
    say(words, RankWord(numerics=runner.info.numerics, num_blocks=runner.info.num_blocks))
    runner.serve()


def main() -> int:
    words = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no word
    task = RankTask.from_json(sys.stdin.readline())
    end_with_front(task.front_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the front decides
    logging.getLogger().addHandler(WordHandler(words))
    try:
        serve(task, words)
    except Exception as error:  # the front says which rank failed, and why
        say(words, RankWord(failure=f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
