"""The program of a rank other than 0: loads its share of the model, and computes it in each step of rank 0.

Its front starts it (rank_processes), with a RankTask as its argument. It knows no store, no scheduler
and no sequence. It says RankWords on its standard output.
"""

import logging
import os
import signal
import sys
from typing import TextIO

from gpu_worker.group.rank_task import RankTask, RankWord
from gpu_worker.running.loading import load_runner


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


def serve(task: RankTask, words: TextIO) -> None:
    runner = load_runner(**task.options, place=task.place())
    say(words, RankWord(numerics=runner.info.numerics, num_blocks=runner.info.num_blocks))
    runner.serve()


def main() -> int:
    words = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no word
    task = RankTask.from_json(sys.argv[1])
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
