"""How a worker becomes empty: it gives its sequences up, so that other workers replay them.

Each replay costs another worker a prompt. So sequences are released a few at a time, the cheapest first, and the next
ones when those run elsewhere. The others go on here meanwhile, and what ends meanwhile ends here. What is left when the
time is over is released at once. Without another worker nothing is released before that: nobody could go on with it.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpu_worker.scheduling.sequence import Sequence
from gpu_worker.serving.engine_client import EngineClient
from gpu_worker.serving.journal_writer import JournalWriter
from octavo.errors import Draining, StoreUnavailable
from octavo.ids import Incarnation, SequenceId
from octavo.loop import end_tasks
from octavo.retry import until_answered
from octavo.store.base import Store
from octavo.store.calls import Member

log = logging.getLogger(__name__)

ROUND_S = 0.05
MEMBERS_EVERY_S = 0.5  # how often the other workers are counted
RELEASES_PER_WORKER = 4  # sequences that one other worker is given to replay at a time
MAX_RELEASES = 32  # sequences on their way to other workers at a time, however many workers there are
REPLAY_PATIENCE_S = 2.0  # a sequence that another worker has had for this long is on its way no more
# How long the store may take for the last tokens, and as long again for the releases. In a drain by command both are
# tried again, as long as the worker lives.
STORE_PATIENCE_S = 3.0
URGENT_PATIENCE_S = 0.7  # the same where a person waits for the end
MANY = 2**62  # tokens: more than there are


@dataclass(slots=True)
class Release:
    """A sequence on its way to another worker."""

    seq_id: SequenceId
    num_tokens: int  # of prompt and output, which the other worker computes
    num_output: int
    taken_at: float = 0.0


class WorkerDrain:
    """Refuses new sequences and releases those that are here, between `begin` and `undo` or the end of the worker.

    Lives on the event loop. `on_change` is told of the beginning, and of `undo`.
    """

    def __init__(
        self,
        store: Store,
        incarnation: Incarnation,
        engine_client: EngineClient,
        journal_writer: JournalWriter,
        on_change: Callable[[bool], None],
    ) -> None:
        self.active = False
        self.num_released = 0
        self._store = store
        self._incarnation = incarnation
        self._engine_client = engine_client
        self._journal_writer = journal_writer
        self._publisher = engine_client.publisher
        self._on_change = on_change
        self._ended = False
        self._until = 0.0
        self._done = asyncio.Event()
        self._done.set()
        self._task: asyncio.Task[None] | None = None
        self._stopped: list[Sequence] = []  # run here no more, and the store has not been told yet
        self._under_way: list[Release] = []
        self._num_others = 0
        self._counted_at = 0.0

    @property
    def num_left(self) -> int:
        """The sequences that are here."""
        return len(self._publisher.logs)

    @property
    def done(self) -> bool:
        """Whether the worker is empty, or its drain has been undone."""
        return self._done.is_set()

    def begin(self, grace_s: float) -> None:
        """Refuses new sequences from now on; after `grace_s` none is here. While it drains: moves that time forward."""
        until = time.monotonic() + grace_s
        self._until = until if self.done else min(self._until, until)
        self._done.clear()
        if not self.active:
            self.active = True
            log.info("draining: no new sequences, %d to go", self.num_left)
            self._on_change(True)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_empty())
            self._task.add_done_callback(log_failure)

    def undo(self) -> None:
        """Lets the worker have sequences again. Those that it has released do not come back by that."""
        if self.active:
            self.active = False
            self._done.set()
            log.info("not draining any more")
            self._on_change(False)

    async def wait_until_done(self) -> None:
        """Returns when the worker is empty, or the drain has been undone."""
        await self._done.wait()

    async def stop(self) -> None:
        """Ends the task of the drain. What is left is not released by this."""
        self._ended = True  # a cancellation can be lost: in a library, or where an error takes its place
        if self._task is not None:
            await end_tasks([self._task])

    async def release_rest(self, *, urgent: bool = False) -> None:
        """Releases all that is here, after the engine has ended."""
        patience_s = URGENT_PATIENCE_S if urgent else STORE_PATIENCE_S
        await self._flush(patience_s)
        await self._give_up([each.sequence for each in self._publisher.logs.values()], patience_s)

    async def _keep_empty(self) -> None:
        """Releases what is here, and what was being admitted when the drain began, until the drain is undone.

        What has been stopped is released in any case: it does not run here any more.
        """
        while not self._ended and (self.active or self._stopped):
            if self._stopped:
                await self._release_stopped()
            elif not self.num_left:
                if not self.done:
                    log.info("drained: this worker has no sequences, and takes none")
                self._done.set()
            elif time.monotonic() >= self._until:
                await self._release(self.num_left, max_tokens=MANY)
            else:
                await self._release_some()
            await asyncio.sleep(ROUND_S)

    async def _release_some(self) -> None:
        """Releases what the other workers can be given now. An outage of the store is waited for."""
        try:
            num_others = await self._count_others()
            self._under_way = [each for each in self._under_way if await self._is_under_way(each)]
        except StoreUnavailable:
            return
        num_free = min(RELEASES_PER_WORKER * num_others, MAX_RELEASES) - len(self._under_way)
        free_tokens = num_others * self._engine_client.max_batch_tokens - sum(r.num_tokens for r in self._under_way)
        if num_free > 0 and (free_tokens > 0 or not self._under_way):
            await self._release(num_free, free_tokens)

    async def _release(self, max_sequences: int, max_tokens: int) -> None:
        try:
            dropped = await self._engine_client.drop_cheapest(max_sequences, max_tokens)
        except Draining:
            return  # the engine has ended: `release_rest` does it
        self._stopped += dropped
        await self._release_stopped()

    async def _release_stopped(self) -> None:
        """Releases what has been stopped. What the store does not take while there is time, the next round releases."""
        patience_s = max(STORE_PATIENCE_S, self._until - time.monotonic())
        await self._flush(patience_s)
        self._stopped = await self._give_up(self._stopped, patience_s)

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
                    lambda: self._store.requeue(seq_id, sequence.epoch), patience_s=patience_s, what="release"
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

    async def _count_others(self) -> int:
        """How many other workers serve this model and do not drain."""
        now = time.monotonic()
        if now - self._counted_at > MEMBERS_EVERY_S:
            members = await self._store.members("worker")
            mine = self._engine_client.info
            self._num_others = sum(
                each.id != self._incarnation and takes_over(each, mine.fingerprint, mine.layout) for each in members
            )
            self._counted_at = now
        return self._num_others


def log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("the drain has ended: what is left is released when this worker ends", exc_info=error)


def describe_worker(base: dict[str, object], fingerprint: str, layout: str, *, draining: bool) -> bytes:
    """What a worker whose model is loaded says of itself in the store."""
    return json.dumps({**base, "fingerprint": fingerprint, "layout": layout, "draining": draining}).encode()


def takes_over(member: Member, fingerprint: str, layout: str) -> bool:
    """Whether a worker can replay sequences of a model, as far as it says. One that says nothing of its model may."""
    try:
        info = json.loads(member.info)
        same = (info.get("fingerprint", fingerprint), info.get("layout", layout)) == (fingerprint, layout)
        return same and not info.get("draining", False)
    except (AttributeError, ValueError):
        return False
