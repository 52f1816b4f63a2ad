"""The owner of running sequences: names to other workers, their buddies, which blocks to have in case that it dies.

    engine ─▶ histories of long sequences ─▶ a buddy for each ─▶ Standby, once a round ─▶ the buddy fetches

No call holds a sequence up, and no failure is one of the sequence: it has another buddy then, or none for a while.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.engine.worker_watch import WorkerWatch
from gpu_worker.migration.calls.connection_pool import ConnectionPool
from gpu_worker.migration.calls.standby_calls import MOST_HISTORIES, MOST_SENT_BYTES, StandbyRequest, num_sent_bytes
from gpu_worker.migration.calls.targets import TargetPool, TargetWorker
from gpu_worker.migration.standby.covered_sequences import CoveredBranch, CoveredSequences, note_state
from gpu_worker.migration.standby.kept_histories import KEEP_S
from gpu_worker.scheduling.standby_blocks import LastBlocks
from gpu_worker.steps.runner import BlockMemory, BlocksInPlace
from octavo.request.errors import ServingError
from octavo.request.ids import BlockId, Incarnation

log = logging.getLogger(__name__)

# A buddy is behind by the time between two rounds, and by the block that is being filled. A round costs the same
# whatever is new in it, so many histories, whose blocks fill all the time, share longer ones.
ROUND_S = 0.03
ROUND_PER_HISTORY_S = 0.25  # beside the first one
LONGEST_ROUND_S = 1.0
REFRESH_S = 2.0  # how often a buddy is told that nothing is new
CANDIDATES_S = 2.0  # how often it is asked who may be a buddy
AVOID_S = 10.0  # how long a worker that had no room, or did not answer, is not chosen
MOST_NAMED = 16_384  # hashes of one call
# A tail is sent when this part of a block is new in it, with a call that names blocks or alone. Calls for tails alone
# take a small part of the time.
TAIL_PART = 4
TAIL_PAUSE = 20.0  # times the last call


@dataclass(slots=True, eq=False)
class ToldBuddy:
    """A worker that was asked to keep something."""

    buddy: TargetWorker
    called_at: float = float("-inf")
    answered_at: float = field(default_factory=lambda: time.monotonic())  # or when it was first asked
    tail_after: float = float("-inf")  # when a call may be made for a tail alone


class FoundBlocks(NamedTuple):
    """The last blocks of a branch, which go along with a call."""

    branch: CoveredBranch
    last: LastBlocks


class StandbyOwner:
    """Lives on the event loop. What it knows is in memory alone."""

    def __init__(
        self,
        incarnation: Incarnation,
        blocks: BlockPort,
        targets: TargetPool,
        connections: ConnectionPool,
        watch: WorkerWatch,
        min_tokens: int,
        memory: BlockMemory,
    ) -> None:
        """Bytes are sent where blocks can be read as they lie: on a GPU it takes no time to compute a block again."""
        self.sequences = CoveredSequences()
        self.num_failed = 0  # calls that were refused or not answered
        self._incarnation = incarnation
        self._blocks = blocks
        self._targets = targets
        self._connections = connections
        self._min_tokens = min_tokens
        self._watch = watch
        self._candidates: dict[Incarnation, TargetWorker] = {}
        self._candidates_at = float("-inf")
        self._avoided: dict[Incarnation, float] = {}  # until when
        self._num_calls = 0
        self._told: dict[Incarnation, ToldBuddy] = {}  # workers that may keep something for this one
        self._loop = asyncio.get_running_loop()
        self._stepped = asyncio.Event()
        self._awaits_step = False
        self._memory = memory
        in_place = isinstance(memory, BlocksInPlace)
        self._most_sent = MOST_SENT_BYTES // max(1, memory.bytes_per_block) if in_place else 0  # blocks of a call

    async def run(self) -> None:
        """Goes round for as long as the worker lives."""
        while True:
            began = time.monotonic()
            try:
                await self.go_round()
            except ServingError as error:
                log.info("no standbys in this round: %s", error.message)
            except Exception:  # a standby is worth no sequence of this worker
                log.exception("no standbys in this round")
            round_s = min(LONGEST_ROUND_S, max(ROUND_S, ROUND_PER_HISTORY_S * (self.sequences.num_histories - 1)))
            await asyncio.sleep(max(round_s / 2, round_s - (time.monotonic() - began)))
            await self._wait_for_step()

    async def _wait_for_step(self) -> None:
        """Waits for the end of a step: what it has brought is to be at the buddy before a client has seen it."""
        self._stepped.clear()
        self._awaits_step = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_ROUND_S):
                await self._stepped.wait()

    def note_round(self) -> None:
        """The engine's thread says that it has made a step, or had none to make."""
        if self._awaits_step:
            self._awaits_step = False
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and with it the process
                self._loop.call_soon_threadsafe(self._stepped.set)

    async def go_round(self) -> None:
        """Names to each buddy what it is to have now."""
        draining, known = self._watch.draining, self.sequences.known()
        found = {} if draining else await self._blocks.histories(self._min_tokens, known)
        self.sequences.update(found)
        self._watch.num_standby_sequences = self.sequences.num_covered
        if found:
            await self._choose_buddies()
        by_buddy = self.sequences.num_blocks_by_buddy()
        for each in by_buddy:
            if each not in self._told and each in self._candidates:
                self._told[each] = ToldBuddy(self._candidates[each])
        await asyncio.gather(*(self._tell_news(told) for told in list(self._told.values())))

    async def _tell_news(self, told: "ToldBuddy") -> None:
        """Calls a buddy, if there is something new for it."""
        has_news = self._has_news(told)
        found = await self._read_last(told) if has_news or time.monotonic() > told.tail_after else None
        if has_news or (found is not None and found.last.tail is not None):
            await self._tell(told, found)

    async def _read_last(self, told: "ToldBuddy") -> FoundBlocks | None:
        """The last blocks of a history that the buddy does not know yet, and the tail if enough of it is new there.

        None while the limit of what may leave is used up: full blocks are fetched then, and wait for their turn.
        """
        if not self._most_sent or not self._connections.share.limiter.has_room:
            return None
        found = self.sequences.next_tail(told.buddy.incarnation)
        if found is None:
            return None
        key, branch = found
        branch.tail_at = time.monotonic()
        num_blocks = len(branch.hashes)
        first = branch.num_named if num_blocks - branch.num_named < self._most_sent else num_blocks
        num_sent = branch.tail[1] if branch.tail[0] == num_blocks else 0
        num_new = max(1, self._blocks.info.block_size // TAIL_PART)
        last = await self._blocks.read_last(key, first, num_blocks, num_sent + num_new, self._read)
        return FoundBlocks(branch, last)

    def _read(self, block: BlockId) -> bytes:
        with self._memory.read_blocks([block]) as contents:
            return b"".join(next(iter(contents)))

    def _has_news(self, told: "ToldBuddy") -> bool:
        """Whether a buddy is to be called in this round."""
        return self.sequences.has_news(told.buddy.incarnation) or time.monotonic() - told.called_at > REFRESH_S

    async def _choose_buddies(self) -> None:
        """Each sequence without a buddy gets the worker that has fewest blocks of this one."""
        now = time.monotonic()
        if now - self._candidates_at > CANDIDATES_S:
            self._candidates_at = now
            self._candidates = {each.incarnation: each for each in await self._targets.candidates()}
        self._avoided = {each: until for each, until in self._avoided.items() if until > now}
        by_buddy = self.sequences.num_blocks_by_buddy()
        self.sequences.leave([each for each in by_buddy if each not in self._candidates])
        choice = [each for each in self._candidates.values() if each.incarnation not in self._avoided]
        for sequence in self.sequences.without_buddy() if choice else ():
            buddy = min(choice, key=lambda each: (each.for_prompts, by_buddy[each.incarnation])).incarnation
            by_buddy[buddy] += sequence.num_blocks
            sequence.choose(buddy)

    async def _tell(self, told: "ToldBuddy", found: FoundBlocks | None = None) -> None:
        """One call. A buddy that does not answer, or has no room, is none for a while.

        It is told that it need keep nothing, until it has answered that, or has forgotten it by itself.
        """
        buddy, told.called_at = told.buddy, time.monotonic()
        named = self.sequences.named(buddy.incarnation, MOST_NAMED)[:MOST_HISTORIES]
        info = self._blocks.info
        self._num_calls += 1
        histories = [each for each, _, _ in named]
        if found is not None:
            histories = [
                replace(one, blocks=found.last.full, tail=found.last.tail)
                if each is found.branch and one.first + len(one.hashes) == len(each.hashes)  # else more are to be named
                else one
                for one, each, _ in named
            ]
        request = StandbyRequest(
            self._incarnation, info.fingerprint, info.layout, info.numerics, histories, self._num_calls
        )
        self._connections.share.limiter.count_bytes(num_sent_bytes(histories))
        try:
            async with self._connections.connect(buddy) as connection:
                states = await connection.client.standby(request)
        except ServingError as error:
            if named:
                log.info("worker %s is no buddy: %s", buddy.incarnation, error.message)
                self.num_failed += 1
                self._avoid(buddy.incarnation)
                self.sequences.leave([buddy.incarnation])
            if time.monotonic() - told.answered_at > KEEP_S:
                self._told.pop(buddy.incarnation, None)
            return
        told.answered_at = time.monotonic()
        told.tail_after = told.answered_at + TAIL_PAUSE * (told.answered_at - told.called_at)
        if found is not None and found.last.tail is not None and any(each is found.branch for _, each, _ in named):
            found.branch.tail = len(found.branch.hashes), found.last.num_in_tail
        if not named:
            self._told.pop(buddy.incarnation, None)
        for (_, branch, sequence), state in zip(named, states, strict=True):
            if sequence.buddy != buddy.incarnation:
                continue  # another branch of it was refused
            note_state(branch, state)
            if state.refused:
                self._avoid(buddy.incarnation)
                sequence.choose(None)

    def _avoid(self, worker: Incarnation) -> None:
        self._avoided[worker] = time.monotonic() + AVOID_S
