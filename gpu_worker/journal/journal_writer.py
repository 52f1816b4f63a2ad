"""Appends tokens to the journals in the store, and publishes only those that the store has accepted.

The step loop does not wait for the store. The engine submits the items of each step that has any, and of each step of
a finite grant, which its stream awaits. One task appends everything that is due (`pending_items`) in one call, then
publishes what was accepted. While the store is away StepItems gather. At WINDOW_STEPS of them the engine is held until
the store answers, so that a worker that dies costs at most about that many computed steps.
"""

import asyncio
import logging
import time

from gpu_worker.engine.command_port import CommandPort, LoopControl
from gpu_worker.journal.pending_items import AppendPolicy, BranchRun, ItemBatch, PendingItems
from gpu_worker.journal.sequence_log import SequenceLog
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.step import StepItems
from octavo.metrics.table import CALL_BOUNDS
from octavo.metrics.value import Histogram
from octavo.process.retry import until_answered
from octavo.request.errors import HistoryLost
from octavo.request.ids import Incarnation
from octavo.request.sampling import FinishReason
from octavo.store.base import Store
from octavo.store.calls import AppendItem, AppendReply, AppendStatus, Finish

log = logging.getLogger(__name__)

WINDOW_STEPS = 32  # StepItems that wait for the store; steps that brought nothing are not among them
ACCEPTED = (AppendStatus.OK, AppendStatus.OK_CANCEL, AppendStatus.DUP)
# The reply to a mended gap may be GAP again. After that, either status means that the record cannot be trusted.
BROKEN = (AppendStatus.CONFLICT, AppendStatus.GAP)

REFUSALS = {
    AppendStatus.FENCED: "another worker owns it now, or it waits",
    AppendStatus.CLOSED: "it has ended",
    AppendStatus.GONE: "its record is gone",
}


class JournalWriter:
    """Appends the tokens of each step to the store, in order, and publishes those that the store has accepted."""

    def __init__(
        self,
        store: Store | None,
        owner: Incarnation,
        publisher: StepPublisher,
        port: CommandPort,
        control: LoopControl,
        policy: AppendPolicy = AppendPolicy(),  # noqa: B008  frozen: one for all
        window_steps: int = WINDOW_STEPS,
    ) -> None:
        """`owner` is this worker, in whose name tokens are appended.

        `store` is None where the journal is off, for benchmarks: all tokens count as accepted.
        """
        self._store = store
        self._owner = owner
        self._publisher = publisher
        self._port = port
        self._control = control
        self._window = window_steps
        self._pending = PendingItems(policy, publisher.find_log)
        self._loop = asyncio.get_running_loop()
        self._progress: dict[Sequence, int] = {}  # of beam searches, which the store is to be told
        self._wake = asyncio.Event()
        self._num_submitted = self._num_settled = 0  # StepItems so far
        self._settled = asyncio.Condition()
        self._held = False
        self.append_times = Histogram(CALL_BOUNDS)  # in seconds, until the store has answered
        self.num_tokens = 0  # that the journal has accepted
        self.num_fenced = 0  # appends that the store has refused

    def submit_soon(self, result: StepItems) -> None:
        """What the engine's thread does with each result."""
        self._loop.call_soon_threadsafe(self.submit, result)

    def submit(self, result: StepItems) -> None:
        """Adds the items of a step to those that wait for the store. Only the event loop may call this."""
        self._pending.add_step(result, time.monotonic())
        self._progress.update((each.sequence, each.num_tokens) for each in result.progress)
        self._num_submitted += 1
        if self._num_submitted - self._num_settled >= self._window and not self._held:
            self._hold(True)
        self._wake.set()

    async def wait_until_flushed(self, *, at_once: bool = False) -> None:
        """Returns when everything that was submitted before this call has been accepted or refused.

        With `at_once`, tokens that gather for a common append wait no longer.
        """
        wanted = self._num_submitted
        if at_once:
            self._pending.hurry()
            self._wake.set()
        async with self._settled:
            await self._settled.wait_for(lambda: self._num_settled >= wanted)

    async def run(self) -> None:
        """Appends for as long as the worker lives. An exception here must end the worker."""
        while True:
            await self._wait_for_items()
            while self._progress:
                await self._tell_progress(*self._progress.popitem())
            while batch := self._pending.next_batch(time.monotonic()):
                await self._append(batch)
                if self._held:
                    self._hold(False)
                async with self._settled:
                    self._num_settled += batch.num_steps
                    self._settled.notify_all()

    async def _wait_for_items(self) -> None:
        """Returns with the next step, or when the steps that wait are due without another one."""
        try:
            async with asyncio.timeout(self._pending.wait_s(time.monotonic())):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _hold(self, held: bool) -> None:
        self._held = held
        self._control.hold_steps(held)

    async def _tell_progress(self, sequence: Sequence, num_tokens: int) -> None:
        """Tells the store how far a beam search is: its journals are empty until it ends."""
        store, sequence_log = self._store, self._publisher.logs.get(sequence.seq_id)
        if store is None or sequence_log is None or sequence_log.sequence is not sequence:
            return
        status = await until_answered(
            lambda: store.note_progress(sequence.seq_id, sequence.epoch, self._owner, num_tokens), what="beams"
        )
        if sequence_log.gone:
            return
        if status is AppendStatus.OK_CANCEL:
            self._port.tell(lambda scheduler: scheduler.cancel(sequence))
        elif status is not AppendStatus.OK:
            self._drop(sequence_log, status)
        sequence_log.note_progress(num_tokens)

    async def _append(self, batch: ItemBatch) -> None:
        for run, reply in zip(batch.runs, await self._send([run.to_append() for run in batch.runs]), strict=True):
            # While the store was awaited, an earlier reply of this batch may have ended the sequence or the branch, or
            # a newer admission may have replaced the log.
            if not run.sequence_log.gone and not run.sequence_log.branches[run.branch].ended:
                await self._settle(run, reply)
        self._publisher.flush(batch.last_step, max(1, batch.num_steps))

    async def _send(self, items: list[AppendItem]) -> list[AppendReply]:
        store = self._store
        if store is None or not items:
            return [AppendReply(AppendStatus.OK, item.first_index + len(item.token_ids)) for item in items]
        began = time.perf_counter()
        replies = await until_answered(lambda: store.append_batch(self._owner, items), what="the journal")
        self.append_times.observe(time.perf_counter() - began)
        return replies

    async def _settle(self, run: BranchRun, reply: AppendReply) -> None:
        """Does what the store's reply to one item asks for."""
        sequence_log = run.sequence_log
        if reply.status == AppendStatus.GAP:
            reply = await self._mend(run, reply.length)
        if reply.status in ACCEPTED:
            for item in run.items:
                self.num_tokens += len(item.token_ids)
                self._publisher.publish_item(sequence_log, item)
            if reply.status == AppendStatus.OK_CANCEL and not run.items[-1].finish:
                self._port.tell(lambda scheduler: scheduler.cancel(sequence_log.sequence))
        elif reply.status == AppendStatus.CLOSED:
            self._port.tell(lambda scheduler: scheduler.end_branch(sequence_log.sequence, run.branch))
            self._publisher.end_branch(sequence_log, run.branch)
        elif reply.status in BROKEN:
            await self._give_up(sequence_log, reply.status)
        else:
            self._drop(sequence_log, reply.status)

    def _drop(self, sequence_log: SequenceLog, status: AppendStatus) -> None:
        """Runs a sequence no further: the store has given it to another worker, or has ended or lost it."""
        self.num_fenced += status is AppendStatus.FENCED
        log.warning("sequence %s: refused at epoch %d: %s", sequence_log.seq_id, sequence_log.epoch, REFUSALS[status])
        self._port.tell(lambda scheduler: scheduler.drop(sequence_log.sequence))
        self._publisher.forget_log(sequence_log)

    async def _mend(self, run: BranchRun, length: int) -> AppendReply:
        """Appends again what the store has lost of the journal's end. The log still has every token of it."""
        lost = run.sequence_log.branches[run.branch].tokens[length:]
        log.warning("journal of %s fell back to %d tokens; appending it again", run.sequence_log.seq_id, length)
        return (await self._send([run.to_append(length, lost)]))[0]

    async def _give_up(self, sequence_log: SequenceLog, status: AppendStatus) -> None:
        """Ends the record with HISTORY_LOST: it does not hold what this worker computed, so no worker can go on.

        Where this worker is the owner no more, nothing ends: sessions compare what they delivered with the journal.
        """
        seq_id = sequence_log.seq_id
        log.error("journal of %s says %s: history cannot be trusted", seq_id, status)
        failure = HistoryLost("the journal does not continue what this worker computed").failure()
        self._port.tell(lambda scheduler: scheduler.drop(sequence_log.sequence))
        ended = True
        if (store := self._store) is not None:
            end = Finish(seq_id, FinishReason.ERROR, failure=failure.to_json(), epoch=sequence_log.epoch)
            ended = await until_answered(lambda: store.finish(end), what=f"the record of {seq_id}")
        if sequence_log.gone:
            return
        if ended:
            self._publisher.publish_failure(sequence_log, failure)
        else:
            self._publisher.forget_log(sequence_log)
