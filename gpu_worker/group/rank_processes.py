"""The processes of the ranks other than 0: their start, their words and their end."""

import io
import logging
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from gpu_worker.group.rank_task import RankTask, RankWord
from octavo.process.launcher import launched

log = logging.getLogger(__name__)
END_PATIENCE_S = 5.0


class RankFailed(RuntimeError):
    """A rank of the group could not start, or has ended. The whole group computes nothing any more."""


@dataclass(slots=True, eq=False)
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    words: io.BufferedReader
    rest: bytes = b""  # of its words: what is no line yet
    ready: RankWord | None = None
    failure: str = ""


@dataclass(slots=True)
class _News:
    """What the thread that watches has seen."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    started: bool = False
    loss: str = ""


class RankProcesses:
    """Starts ranks, and watches them in a thread that lives as long as they do: they end with it (launcher.py)."""

    def __init__(self, tasks: Sequence[RankTask], on_loss: Callable[[], None]) -> None:
        """`on_loss` is called in the thread that watches, once, when a rank has ended by itself."""
        self._tasks = tasks
        self._on_loss = on_loss
        self._ranks: list[_Rank] = []
        self._news = _News()
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    @property
    def loss(self) -> str:
        """Which rank has ended, and how; empty while all live."""
        return self._news.loss

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def wait_until_ready(self) -> list[RankWord]:
        """What all ranks say of themselves. Raises RankFailed if one cannot start."""
        news = self._news
        with news.condition:
            news.condition.wait_for(lambda: news.loss or (news.started and all(rank.ready for rank in self._ranks)))
        if news.loss:
            raise RankFailed(news.loss)
        return [rank.ready for rank in self._ranks if rank.ready is not None]

    def close(self) -> None:
        """Ends all ranks, and waits until they are gone."""
        self._closing = True
        with self._news.condition:
            self._news.condition.wait_for(lambda: self._news.started or self._news.loss, END_PATIENCE_S)
        for rank in self._ranks:
            rank.process.kill()
        self._thread.join(END_PATIENCE_S)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                for task in self._tasks:
                    self._ranks.append(rank := _start(task))
                    selector.register(rank.words, selectors.EVENT_READ, rank)
                self._tell(started=True)
            except OSError as error:
                self._tell(loss=f"rank {len(self._ranks) + 1} cannot start: {error}")
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                        key.data.words.close()

    def _read(self, rank: _Rank) -> bool:
        """Takes in what a rank says. False: it has ended."""
        data = rank.words.read1()
        *lines, rank.rest = (rank.rest + data).split(b"\n")
        for line in lines:
            self._hear(rank, RankWord.from_json(line.decode()))
        if data:
            return True
        status = rank.process.wait()
        if not self._closing:
            how = rank.failure or (f"killed by signal {-status}" if status < 0 else f"it ended with status {status}")
            self._tell(loss=f"rank {rank.number} (pid {rank.process.pid}): {how}")
        return False

    def _hear(self, rank: _Rank, word: RankWord) -> None:
        if word.line:
            log.log(word.level, "rank %d: %s", rank.number, word.line)
        elif word.failure:
            rank.failure = word.failure
        else:
            with self._news.condition:
                rank.ready = word
                self._news.condition.notify_all()

    def _tell(self, *, started: bool = False, loss: str = "") -> None:
        with self._news.condition:
            first = bool(loss) and not self._news.loss
            self._news.started |= started
            self._news.loss = self._news.loss or loss
            self._news.condition.notify_all()
        if first:
            log.error("%s: the group ends", loss)
            self._on_loss()


def _start(task: RankTask) -> _Rank:
    safe_path = ["-P"] if sys.flags.safe_path else []
    process = subprocess.Popen(
        launched([sys.executable, *safe_path, "-m", "gpu_worker.group.rank", task.to_json()]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        pass_fds=(task.team, task.arena),
    )
    return _Rank(task.rank, process, cast("io.BufferedReader", process.stdout))
