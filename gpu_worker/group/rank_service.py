"""What a rank other than 0 does: loads its share of the model, and computes it in each step of rank 0."""

import logging
import os
import socket
import threading
from dataclasses import asdict
from typing import Any, TextIO

from gpu_worker.group.rank_task import RankTask, RankUsage, RankWord
from gpu_worker.running.loading import load_runner


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


def serve(told: str, words: TextIO) -> None:
    """Until the group is broken. `told` is a RankTask."""
    task = RankTask.from_json(told)
    speaker = Speaker(task.rank, words)
    logging.getLogger().addHandler(speaker)
    runner = load_runner(**task.options, place=task.place(lambda team: speaker.say(has_loaded=True)))
    info = runner.info
    speaker.say(numerics=info.numerics, num_blocks=info.num_blocks, host=socket.gethostname(), pid=os.getpid())
    threading.Thread(target=speaker.beat, args=(task,), name="beat", daemon=True).start()
    runner.serve()
