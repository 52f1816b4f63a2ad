"""How a worker gives sequences up, so that other workers replay them from their journals.

Each replay costs another worker a prompt. So sequences are released a few at a time, the cheapest first, and the next
ones when those run elsewhere.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import inf

from gpu_worker.engine.command_port import CommandPort
from gpu_worker.journal.journal_writer import JournalWriter
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.scheduler_config import StepBudget
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.workload import Workload
from octavo.process.retry import until_answered
from octavo.request.errors import Draining, StoreUnavailable
from octavo.request.ids import SequenceId
from octavo.store.base import Store

log = logging.getLogger(__name__)

RELEASES_PER_WORKER = 4  # sequences that one other worker is given to replay at a time
MAX_RELEASES = 32  # sequences on their way to other workers at a time, however many workers there are
REPLAY_PATIENCE_S = 2.0  # a sequence that another worker has had for this long is on its way no more
# How long the store may take for the last tokens, and as long again for the releases. In a drain by command both are
# tried again, as long as the worker lives.
STORE_PATIENCE_S = 3.0
URGENT_PATIENCE_S = 0.7  # the same where a person waits for the end
OUTGROWN_EVERY_S = 0.05
LIMITS_S = 2.0  # how often the store is asked how large the other workers are
KEPT_MS = 24 * 3600 * 1000  # routers decide for how long workers that are gone are remembered
MANY = 2**62  # tokens: more than there are


@dataclass(slots=True)
class Release:
    """A sequence on its way to another worker."""

    seq_id: SequenceId
    num_tokens: int  # of prompt and output, which the other worker computes
    num_output: int
    taken_at: float = 0.0


class SequenceReleaser:
    """Releases the sequences of this worker. Lives on the event loop."""

    def __init__(
        self,
        store: Store,
        port: CommandPort,
        workload: Workload,
        budget: StepBudget,
        publisher: StepPublisher,
        journal_writer: JournalWriter,
    ) -> None:
        self.num_released = 0
        self._store = store
        self._port = port
        self._workload = workload
        self._budget = budget
        self._journal_writer = journal_writer
        self._publisher = publisher
        self._stopped: list[Sequence] = []  # run here no more, and the store has not been told yet
        self._under_way: list[Release] = []

    @property
    def has_stopped(self) -> bool:
        """Whether a sequence runs here no more, of which the store has not been told."""
        return bool(self._stopped)

    async def release_some(self, num_others: int, besides: Collection[SequenceId] = ()) -> None:
        """Releases what so many other workers can be given now, but none of `besides`. Raises StoreUnavailable."""
        if all(seq_id in besides for seq_id in self._publisher.logs):
            return  # without a command to the engine, which would wait for a step
        self._under_way = [each for each in self._under_way if await self._is_under_way(each)]
        num_free = min(RELEASES_PER_WORKER * num_others, MAX_RELEASES) - len(self._under_way)
        free_tokens = num_others * self._budget.tokens - sum(r.num_tokens for r in self._under_way)
        if num_free > 0 and (free_tokens > 0 or not self._under_way):
            await self._release(self._drop_cheapest(num_free, free_tokens, besides), STORE_PATIENCE_S)

    async def release_all(self) -> None:
        """Releases all that is here, while the engine runs."""
        await self._release(self._drop_cheapest(len(self._publisher.logs), MANY, ()), STORE_PATIENCE_S)

    async def release_outgrown(self) -> None:
        """Releases what this worker is too small for by now, and a larger one is not."""

        def command(scheduler: Scheduler) -> list[Sequence]:
            here = self._workload.sequences
            dropped = [each for each in self._workload.outgrown if here.get(each.seq_id) is each]
            self._workload.outgrown.clear()
            for sequence in dropped:
                log.info("sequence %s has outgrown this worker: it goes to a larger one", sequence.seq_id)
                scheduler.drop(sequence)
            return dropped

        await self._release(command, STORE_PATIENCE_S)

    async def release_rest(self, *, urgent: bool = False) -> None:
        """Releases all that is here, after the engine has ended."""
        patience_s = URGENT_PATIENCE_S if urgent else STORE_PATIENCE_S
        await self._flush(patience_s)
        await self._give_up([each.sequence for each in self._publisher.logs.values()], patience_s)

    async def release_stopped(self, patience_s: float = STORE_PATIENCE_S) -> None:
        """Tells the store of what has been stopped. What it does not take in time, the next call tells it."""
        await self._flush(patience_s)
        self._stopped = await self._give_up(self._stopped, patience_s)

    async def _release(self, drop: Callable[[Scheduler], list[Sequence]], patience_s: float) -> None:
        try:
            dropped = await self._port.ask(drop)
        except Draining:
            return  # the engine has ended: `release_rest` does it
        if dropped:
            self._stopped += dropped
            await self.release_stopped(patience_s)

    def _drop_cheapest(
        self, max_sequences: int, max_tokens: int, besides: Collection[SequenceId]
    ) -> Callable[[Scheduler], list[Sequence]]:
        """Stops the sequences that another worker replays with the least work: one at least, but none of `besides`."""

        def command(scheduler: Scheduler) -> list[Sequence]:
            dropped, num_tokens = list[Sequence](), 0
            here = (each for each in self._workload.sequences.values() if each.pooling is None)  # not in the store
            candidates = [each for each in here if each.seq_id not in besides]
            for sequence in sorted(candidates, key=replay_cost):
                num_tokens += replay_cost(sequence)[1]
                if len(dropped) >= max_sequences or (dropped and num_tokens > max_tokens):
                    break
                scheduler.drop(sequence)
                dropped.append(sequence)
            return dropped

        return command

    async def _flush(self, patience_s: float) -> None:
        try:
            async with asyncio.timeout(patience_s):
                await self._journal_writer.wait_until_flushed()
        except TimeoutError:
            log.warning("the store is away: the last tokens were not journalled, and will be computed again elsewhere")

    async def _give_up(self, sequences: Iterable[Sequence], patience_s: float) -> list[Sequence]:
        """Puts sequences that run here no more back into the queue. The epoch fences what may still come of them.

        Returns those of which the store does not know it yet.
        """
        sequences = list(sequences)
        answers = await asyncio.gather(*(self._requeue(each, patience_s) for each in sequences))
        left = [each for each, answered in zip(sequences, answers, strict=True) if not answered]
        if left:
            log.warning("the store is away: %d sequences wait until it is told, or until the lease ends", len(left))
        return left

    async def _requeue(self, sequence: Sequence, patience_s: float) -> bool:
        """Returns whether the store knows that the sequence runs here no more."""
        seq_id = sequence.seq_id
        try:
            async with asyncio.timeout(patience_s):  # cuts off a call that hangs
                waits = await until_answered(
                    lambda: self._store.requeue(seq_id, sequence.epoch, "released by the worker"),
                    patience_s=patience_s,
                    what="release",
                )
        except (StoreUnavailable, TimeoutError):
            return False
        sequence_log = self._publisher.logs.get(seq_id)
        if sequence_log is not None and sequence_log.sequence is sequence:
            self._publisher.release_log(sequence_log)
        if waits:
            num_output = sum(branch.num_output for branch in sequence.branches)
            self._under_way.append(Release(seq_id, len(sequence.prompt) + num_output, num_output))
            self.num_released += 1
        return True

    async def _is_under_way(self, release: Release) -> bool:
        """Whether the replay of a released sequence is still to be done: no other worker has come further with it."""
        snapshot = await self._store.read(release.seq_id)
        if snapshot is None or snapshot.record.state.ended:
            return False
        record, now = snapshot.record, time.monotonic()
        if not record.owner:
            return True
        release.taken_at = release.taken_at or now
        return sum(record.num_tokens) <= release.num_output and now - release.taken_at < REPLAY_PATIENCE_S


class OutgrownRelease:
    """Keeps the scheduler told of the largest worker of its model, and releases what it has handed over.

    A worker in which a sequence fills all blocks can compute no further token of it. The scheduler ends it with LENGTH,
    unless a larger worker can go on with it: then it is released, and its router gives it to that worker.
    """

    def __init__(self, store: Store, workload: Workload, releaser: SequenceReleaser) -> None:
        self._store = store
        self._workload = workload
        self._releaser = releaser
        self._asked_at = -inf

    async def learn_limits(self) -> None:
        """Returns once the store has said how large the others are: else what grows here could end too early."""
        await until_answered(self._ask, what="how large other workers are")

    async def run(self) -> None:
        """For as long as the worker lives."""
        while True:
            if time.monotonic() - self._asked_at >= LIMITS_S:
                with contextlib.suppress(StoreUnavailable):
                    await self._ask()
            if self._releaser.has_stopped:
                await self._releaser.release_stopped()
            if self._workload.outgrown:
                await self._releaser.release_outgrown()
            await asyncio.sleep(OUTGROWN_EVERY_S)

    async def _ask(self) -> None:
        self._asked_at = time.monotonic()
        seen = await self._store.note_limits((), KEPT_MS)
        own = self._workload.info.fingerprint
        self._workload.larger_limit = max((each.prompt_limit for each in seen if each.fingerprint == own), default=0)


def replay_cost(sequence: Sequence) -> tuple[bool, int]:
    """What it costs that another worker runs the sequence: whether work is thrown away, and the tokens to compute.

    A sequence that waits here loses nothing, and cannot go on here.
    """
    num_output = sum(branch.num_output for branch in sequence.branches)
    return any(branch.num_computed for branch in sequence.branches), len(sequence.prompt) + num_output
