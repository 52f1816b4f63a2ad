"""Tokens go to the store first and to routers after it has accepted them. The step loop does not wait for either.

The engine hands over the deltas of each step; one task appends everything that has gathered, in one batch, then hands
on what was accepted. While the store is away, deltas gather; past a window the engine is held, and nothing is lost.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from gpu_worker.scheduling.sequence import Sequence
from gpu_worker.scheduling.step import Delta, StepResult
from gpu_worker.serving.sequence_log import SequenceLog
from gpu_worker.serving.step_publisher import StepPublisher
from octavo.errors import HistoryLost, StoreUnavailable
from octavo.sampling import FinishReason
from octavo.store.base import Store
from octavo.store.calls import AppendItem, AppendReply, AppendStatus, Finish

T = TypeVar("T")
log = logging.getLogger(__name__)

WINDOW_STEPS = 32
RETRY_S = 0.1
ACCEPTED = (AppendStatus.OK, AppendStatus.OK_CANCEL, AppendStatus.DUP)
BROKEN = (AppendStatus.CONFLICT, AppendStatus.GAP)  # after a gap has been mended: neither ever happens


class EngineControl(Protocol):
    """What the journal tells the engine. A sequence that has been replaced meanwhile is left alone."""

    def hold(self, held: bool) -> None: ...
    def drop(self, sequence: Sequence) -> None: ...
    def cancel_one(self, sequence: Sequence) -> None: ...
    def end_branch(self, sequence: Sequence, branch: int) -> None: ...


class Journal:
    """Appends deltas in order, and feeds the streams with what the store has accepted."""

    def __init__(
        self, store: Store | None, publisher: StepPublisher, control: EngineControl, window_steps: int = WINDOW_STEPS
    ) -> None:
        self._store = store  # None: journal off, for benchmarks
        self._publisher = publisher
        self._control = control
        self._window = window_steps
        self._pending: deque[StepResult] = deque()
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._held = False
        self.num_fenced = 0
        self.num_appended = 0

    def submit(self, result: StepResult) -> None:
        """Takes a step's deltas; to be called on the event loop."""
        self._pending.append(result)
        self._empty.clear()
        if len(self._pending) >= self._window and not self._held:
            self._hold(True)
        self._wake.set()

    @property
    def idle(self) -> bool:
        return not self._pending

    async def flushed(self) -> None:
        """Returns when everything that was submitted has been accepted or refused."""
        await self._empty.wait()

    async def run(self) -> None:
        """For as long as the worker lives: whatever ends this must end the worker."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                results = list(self._pending)
                await self._append(results)
                for _ in results:
                    self._pending.popleft()
                if self._held:
                    self._hold(False)
            self._empty.set()

    def _hold(self, held: bool) -> None:
        self._held = held
        self._control.hold(held)

    async def _append(self, results: list[StepResult]) -> None:
        current = self._publisher.find_log
        steps = [[(delta, entry) for delta in r.deltas if (entry := current(delta))] for r in results]
        replies = iter(await self._send([as_append(delta) for step in steps for delta, _ in step]))
        for result, step in zip(results, steps, strict=True):
            for delta, entry in step:
                reply = next(replies)
                # An answer before this one, or the engine, may have ended the sequence or the branch.
                if not entry.gone and not entry.branches[delta.branch_index].ended:
                    await self._settle(entry, delta, reply)
            self._publisher.flush(result)

    async def _send(self, items: list[AppendItem]) -> list[AppendReply]:
        store = self._store
        if store is None or not items:
            return [AppendReply(AppendStatus.OK, item.first_index + len(item.token_ids)) for item in items]
        self.num_appended += len(items)
        return await insist(lambda: store.append_batch(items))

    async def _settle(self, entry: SequenceLog, delta: Delta, reply: AppendReply) -> None:
        """Does what the store's answer to one delta asks for."""
        if reply.status == AppendStatus.GAP:
            reply = await self._mend(entry, delta, reply.length)
        if reply.status in ACCEPTED:
            self._publisher.publish_delta(entry, delta)
            if reply.status == AppendStatus.OK_CANCEL and not delta.finish:
                self._control.cancel_one(entry.sequence)
        elif reply.status == AppendStatus.CLOSED:
            self._control.end_branch(entry.sequence, delta.branch_index)
            self._publisher.end_branch(entry, delta.branch_index)
        elif reply.status in BROKEN:
            await self._give_up(entry, reply.status)
        else:
            fenced = reply.status == AppendStatus.FENCED
            self.num_fenced += fenced
            why = "another worker owns it now" if fenced else "its record is gone"
            log.warning("sequence %s: refused at epoch %d: %s", entry.seq_id, entry.epoch, why)
            self._control.drop(entry.sequence)
            self._publisher.forget_log(entry)

    async def _mend(self, entry: SequenceLog, delta: Delta, length: int) -> AppendReply:
        """The store lost the end of the journal: this worker still has every token, and appends from there."""
        tokens = entry.branches[delta.branch_index].tokens[length:] + list(delta.token_ids)
        log.warning("journal of %s fell back to %d tokens; appending %d again", entry.seq_id, length, len(tokens))
        item = replace(as_append(delta), first_index=length, token_ids=tokens)
        return (await self._send([item]))[0]

    async def _give_up(self, entry: SequenceLog, status: AppendStatus) -> None:
        """What this worker computed is not what the record holds: nobody can continue either."""
        log.error("journal of %s says %s: history cannot be trusted", entry.seq_id, status)
        failure = HistoryLost("the journal does not continue what this worker computed").failure().to_json()
        self._control.drop(entry.sequence)
        if (store := self._store) is not None:
            await insist(lambda: store.finish(Finish(entry.seq_id, FinishReason.ERROR, failure=failure)))
        if not entry.gone:
            self._publisher.publish_failure(entry, failure)


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """Repeats a call for as long as the store is away. Store functions are idempotent."""
    while True:
        try:
            return await call()
        except StoreUnavailable:
            await asyncio.sleep(RETRY_S)


def as_append(delta: Delta) -> AppendItem:
    return AppendItem(
        delta.sequence.seq_id,
        delta.sequence.epoch,
        delta.branch_index,
        delta.first_index,
        delta.token_ids,
        delta.finish,
        delta.failure,
        delta.cumulative_logprob if delta.finish else None,
    )
