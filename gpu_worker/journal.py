"""Tokens go to the store first and to routers after it has accepted them. The step loop does not wait for either.

The engine hands over the deltas of each step; one task appends everything that has gathered, in one batch, then hands on
what was accepted. While the store is away, deltas gather; past a window the engine is held, and nothing is lost.
"""

import asyncio
import logging
from collections import deque
from dataclasses import replace
from typing import Protocol

from gpu_worker.results import Delta, StepResult
from gpu_worker.streams import SequenceLog, Streams
from octavo.errors import HistoryLost, StoreUnavailable
from octavo.ids import SequenceId
from octavo.record import Append, Appended, AppendStatus
from octavo.store.base import Store

log = logging.getLogger(__name__)

RETRY_S = 0.1
ACCEPTED = (AppendStatus.OK, AppendStatus.OK_CANCEL, AppendStatus.DUP)


class EngineControl(Protocol):
    """What the journal tells the engine."""

    def hold(self, held: bool) -> None: ...
    def drop(self, seq_id: SequenceId, epoch: int) -> None: ...
    def cancel(self, seq_id: SequenceId, epoch: int) -> None: ...
    def end_branch(self, seq_id: SequenceId, epoch: int, branch: int) -> None: ...


class Journal:
    """Appends deltas in order, and feeds the streams with what the store has accepted."""

    def __init__(self, store: Store | None, streams: Streams, control: EngineControl, window: int = 32) -> None:
        self._store = store  # None: journal off, for benchmarks
        self._streams = streams
        self._control = control
        self._window = window
        self._pending: deque[StepResult] = deque()
        self._wake = asyncio.Event()
        self._held = False
        self.num_fenced = 0
        self.num_appended = 0

    def submit(self, result: StepResult) -> None:
        """Takes a step's deltas; to be called on the event loop."""
        self._pending.append(result)
        if len(self._pending) >= self._window and not self._held:
            self._hold(True)
        self._wake.set()

    @property
    def idle(self) -> bool:
        return not self._pending

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                count = len(self._pending)
                results = [self._pending[i] for i in range(count)]
                await self._append(results)
                for _ in range(count):
                    self._pending.popleft()
                if self._held:
                    self._hold(False)

    def _hold(self, held: bool) -> None:
        self._held = held
        self._control.hold(held)

    async def _append(self, results: list[StepResult]) -> None:
        steps = [[(delta, entry) for delta in r.deltas if (entry := self._streams.current(delta))] for r in results]
        replies = iter(await self._send([as_append(delta) for step in steps for delta, _ in step]))
        for result, step in zip(results, steps, strict=True):
            for delta, entry in step:
                reply = next(replies)
                if not entry.gone:
                    await self._settle(entry, delta, reply)
            self._streams.flush(result)

    async def _send(self, items: list[Append]) -> list[Appended]:
        if self._store is None or not items:
            return [Appended(AppendStatus.OK, item.first_index + len(item.token_ids)) for item in items]
        while True:
            try:
                replies = await self._store.append_batch(items)
            except StoreUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            self.num_appended += len(items)
            return replies

    async def _settle(self, entry: SequenceLog, delta: Delta, reply: Appended) -> None:
        if reply.status == AppendStatus.GAP:
            reply = await self._repair(entry, delta, reply.length)
        if reply.status in ACCEPTED:
            self._streams.accept(entry, delta)
            if reply.status == AppendStatus.OK_CANCEL and not delta.finish:
                self._control.cancel(entry.seq_id, entry.epoch)
            return
        if reply.status == AppendStatus.CLOSED and not entry.branches[delta.branch_index].ended:
            self._control.end_branch(entry.seq_id, entry.epoch, delta.branch_index)
            self._streams.end_branch(entry, delta.branch_index)
            return
        if reply.status == AppendStatus.FENCED:
            self.num_fenced += 1
            log.warning("sequence %s: refused at epoch %d: another worker owns it now", entry.seq_id, entry.epoch)
        if reply.status in (AppendStatus.CONFLICT, AppendStatus.GAP):
            log.error("journal of %s says %s: history cannot be trusted", entry.seq_id, reply.status)
            failure = HistoryLost("the journal does not continue what this worker computed").failure()
            self._streams.fail(entry, delta.branch_index, failure.to_json())
        self._control.drop(entry.seq_id, entry.epoch)
        self._streams.forget(entry)

    async def _repair(self, entry: SequenceLog, delta: Delta, length: int) -> Appended:
        """The store lost the end of the journal: this worker still has every token, and appends from there."""
        tokens = entry.branches[delta.branch_index].tokens[length:] + list(delta.token_ids)
        log.warning("journal of %s fell back to %d tokens; appending %d again", entry.seq_id, length, len(tokens))
        item = replace(as_append(delta), first_index=length, token_ids=tokens)
        return (await self._send([item]))[0]


def as_append(delta: Delta) -> Append:
    return Append(
        delta.sequence.seq_id,
        delta.sequence.epoch,
        delta.branch_index,
        delta.first_index,
        delta.token_ids,
        delta.finish,
        delta.failure,
        delta.cumulative_logprob if delta.finish else None,
    )
