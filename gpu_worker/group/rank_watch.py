"""The ranks other than 0 as their front sees them: their start, their words and their end."""

import logging
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpu_worker.group.rank_process import RankProcess, WordSource
from gpu_worker.group.rank_task import RankUsage, RankWord
from gpu_worker.steps.rank_state import RankState
from gpu_worker.steps.runner import RunnerInfo

log = logging.getLogger(__name__)
END_PATIENCE_S = 5.0
REASON_S = 1.0
BROKEN_OFF = "a rank has ended"  # what the extension says if it knows no more
LOADING_S = 600.0  # how long others may take for their model when rank 0 has its own: hosts have as long to come
SILENT_LEASES = 5  # before a rank counts as lost that nobody waits for: a busy machine may not let it speak for one


class RankFailed(RuntimeError):
    """A rank of the group could not start, or has ended. The whole group computes nothing any more."""


def expect_equal(info: RunnerInfo, words: Sequence[RankWord]) -> None:
    """RankFailed unless all ranks compute what rank 0 does, by what they have said."""
    for word in words:
        if (word.numerics, word.num_blocks) != (info.numerics, info.num_blocks):
            raise RankFailed(
                f"rank {word.rank} on {word.host} computes {word.numerics}, and rank 0 {info.numerics}: run the same"
                " version on machines with the same instructions (or give --isa), and start the worker again"
            )


@dataclass(slots=True, eq=False)
class _Rank:
    has_loaded: bool = False
    ready: RankWord | None = None
    failure: str = ""
    usage: RankUsage | None = None
    silent_s: float = 0.0
    late_s: float = 0.0  # how long it has been waited for since rank 0 had its model, before it is ready


@dataclass(slots=True)
class _News:
    """What the thread that watches has seen."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    started: bool = False
    loss: str = ""


class RankWatch:
    """Starts ranks, and watches them in a thread that lives as long as they do."""

    def __init__(self, sources: Sequence[WordSource], patience_s: float, on_loss: Callable[[], None]) -> None:
        """`on_loss` is called in the thread that watches, once, when a rank has ended by itself, or has said nothing
        for SILENT_LEASES times `patience_s` after it was ready."""
        self._patience_s = SILENT_LEASES * patience_s
        self._tick_s = self._patience_s / 10
        self._on_loss = on_loss
        self._sources = sources
        self._rests = dict.fromkeys(sources, b"")  # of the words: what is no line yet
        self._ranks = {number: _Rank() for source in sources for number in source.ranks}
        self._news = _News()
        self._is_awaited = False
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    @property
    def loss(self) -> str:
        """Which rank has ended, and how; empty while all live."""
        return self._news.loss

    @property
    def pids(self) -> list[int]:
        """Of the ranks on this host."""
        return [source.pid for source in self._sources if isinstance(source, RankProcess) and source.pid]

    def states(self) -> list[RankState]:
        """By rank, all that are ready."""
        return [
            RankState(
                rank=number,
                host=rank.ready.host,
                pid=rank.ready.pid,
                silent_s=rank.silent_s,
                memory_bytes=rank.usage.memory_bytes if rank.usage else 0,
                cpu_s=rank.usage.cpu_s if rank.usage else 0.0,
                waited_s=rank.usage.waited_s if rank.usage else 0.0,
            )
            for number, rank in sorted(self._ranks.items())
            if rank.ready is not None
        ]

    def expect_ready(self) -> None:
        """Rank 0 has loaded its model: from now on others are waited for no longer than LOADING_S."""
        self._is_awaited = True

    def wait_until_ready(self) -> list[RankWord]:
        """What all ranks say of themselves, by rank. Raises RankFailed if one cannot start, or takes too long."""
        self.expect_ready()
        news = self._news
        with news.condition:
            news.condition.wait_for(
                lambda: news.loss or (news.started and all(rank.ready for rank in self._ranks.values()))
            )
        if news.loss:
            raise RankFailed(news.loss)
        return [rank.ready for _, rank in sorted(self._ranks.items()) if rank.ready is not None]

    def reason(self, trouble: str) -> str:
        """Why the team is broken. Where its `trouble` names nobody, a rank that failed may be about to say so."""
        news = self._news
        if trouble == BROKEN_OFF:
            with news.condition:
                news.condition.wait_for(lambda: news.loss, REASON_S)
        return news.loss or trouble

    def close(self) -> None:
        """Ends all ranks, and waits until they are gone."""
        self._closing = True
        with self._news.condition:
            self._news.condition.wait_for(lambda: self._news.started, END_PATIENCE_S)
        for source in self._sources:
            source.kill()
        self._thread.join(END_PATIENCE_S)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for source in self._sources:
                try:
                    source.start()
                except OSError as error:
                    self._tell(loss=f"rank {source.ranks[0]} cannot start: {error}")
                    break
                selector.register(source, selectors.EVENT_READ, source)
            self._tell(started=True)
            turned = beaten = time.monotonic()
            while selector.get_map():
                for key, _ in selector.select(self._tick_s):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                # Time in which this process was stopped is nobody's silence.
                for note in (self._note_silence, self._note_lateness):
                    note(min(now - turned, self._tick_s))
                turned = now
                if now - beaten >= self._tick_s:
                    beaten = now
                    for key in selector.get_map().values():
                        key.data.beat()

    def _read(self, source: WordSource) -> bool:
        """Takes in what is said. False: it has ended."""
        data = source.read()
        *lines, self._rests[source] = (self._rests[source] + data).split(b"\n")
        try:
            for line in filter(None, lines):
                self._hear(RankWord.from_json(line.decode()))
        except (ValueError, TypeError, KeyError) as error:  # of another version; nobody would watch if this raised
            log.error("%s says %r: %s", self._named(source.ranks[0]), line[:200], error)
            if not self._closing:
                self._tell(loss=f"{self._named(source.ranks[0])} says what no rank says: all need the same version")
            source.kill()  # its end is read, too
        if data:
            return True
        how = source.ending()
        if not self._closing:
            failed = [number for number in source.ranks if self._ranks[number].failure] or source.ranks
            reason = self._ranks[failed[0]].failure or how
            self._tell(loss=f"{self._named(failed[0])}: {reason}")
        return False

    def _named(self, number: int) -> str:
        """Which rank, and where it is."""
        ready = self._ranks[number].ready
        pids = [source.pid for source in self._sources if isinstance(source, RankProcess) and number in source.ranks]
        if pids:
            return f"rank {number} (pid {pids[0]})"
        return f"rank {number} (pid {ready.pid} on {ready.host})" if ready else f"rank {number}"

    def _note_silence(self, passed_s: float) -> None:
        for number, rank in self._ranks.items():
            if rank.ready is None:
                continue
            rank.silent_s += passed_s
            if rank.silent_s > self._patience_s and not self._closing:
                self._tell(loss=f"{self._named(number)} has said nothing for {self._patience_s:g} s")

    def _note_lateness(self, passed_s: float) -> None:
        """Ranks that have loaded wait for those that have not."""
        waiting = {number: rank for number, rank in self._ranks.items() if rank.ready is None and self._is_awaited}
        loading = {number: rank for number, rank in waiting.items() if not rank.has_loaded}
        for number, rank in (loading or waiting).items():
            rank.late_s += passed_s
            if rank.late_s > LOADING_S and not self._closing:
                what = f"is not ready {LOADING_S:g} s after rank 0 has loaded its model"
                self._tell(loss=f"{self._named(number)} {what}: it hangs, or reads its files too slowly")

    def _hear(self, word: RankWord) -> None:
        rank = self._ranks[word.rank]
        rank.silent_s = 0.0
        if word.line:
            log.log(word.level, "rank %d: %s", word.rank, word.line)
        elif word.failure:
            rank.failure = rank.failure or word.failure
        elif word.has_loaded:
            rank.has_loaded = True
        elif word.usage is not None:
            rank.usage = RankUsage(**word.usage)
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
