"""Classic bugs, by name, which a run can be given: the simulation must find each of them."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import octavo.store.memory.journal as memory_journal
import octavo.store.memory.ownership as memory_ownership
import octavo.store.memory.store as memory_store
import octavo.store.memory.sweep as memory_sweep
from gpu_worker.journal.journal_writer import JournalWriter
from gpu_worker.scheduling.state import sequence
from octavo.client.receiver import StreamReceiver
from octavo.store.calls import AppendReply, AppendStatus
from octavo.store.memory import MemoryStore
from router.fleet import worker_pool
from router.placing.dispatcher import Dispatcher
from router.streaming.branch_reader import BranchReader


def append_without_fence() -> None:
    """The store takes tokens from whoever brings them, at any epoch."""
    memory_journal.fenced = lambda record, owner, epoch: False


def take_without_epoch() -> None:
    """A new owner gets the epoch of the old one."""
    real = memory_ownership.hand_over

    def hand_over(state: Any, stored: Any, owner: Any, **more: Any) -> None:
        real(state, stored, owner, **more)
        stored.record.epoch = max(1, stored.record.epoch - 1)

    memory_ownership.hand_over = hand_over


def send_before_journal() -> None:
    """A worker publishes tokens when it has sent them to the store, and not when the store has them."""
    real = JournalWriter._send

    async def send(writer: JournalWriter, items: list[Any]) -> list[AppendReply]:
        writer.sending = [*getattr(writer, "sending", []), asyncio.create_task(real(writer, items))]
        return [AppendReply(AppendStatus.OK, item.first_index + len(item.token_ids)) for item in items]

    JournalWriter._send = send


def forget_detach() -> None:
    """A router does not tell the store that a client has left."""

    async def detach(store: MemoryStore, *args: Any) -> None:
        pass

    MemoryStore.detach = detach


def detach_everybody() -> None:
    """When one of two routers detaches, the request counts as left by both."""
    real = MemoryStore.detach

    async def detach(store: MemoryStore, seq_id: Any, router: Any) -> None:
        if (stored := store.shared.get(seq_id)) is not None:
            stored.record.routers = (router,)
        await real(store, seq_id, router)

    MemoryStore.detach = detach


def no_sweep() -> None:
    """No router looks for sequences whose owner has died unseen."""

    async def sweep(dispatcher: Dispatcher) -> None:
        await asyncio.sleep(3600)

    Dispatcher._sweep = sweep


def claims_never_end() -> None:
    """What a router has popped is lost when the router dies."""
    memory_sweep._requeue_claims = lambda state, limit: []


def requeue_nothing() -> None:
    """A sequence that no worker could take does not get back into the queue."""

    async def requeue(store: MemoryStore, *args: Any) -> bool:
        return True

    MemoryStore.requeue = requeue


def believe_every_past() -> None:
    """A router does not compare the chain of a client, or of a worker's items, with that of the journal."""
    real_go, real_read = BranchReader.go_to_place, BranchReader.read_run

    def go_to_place(reader: BranchReader, place: Any, output: Any) -> None:
        real_go(reader, place._replace(chain=None), output)

    def read_run(reader: BranchReader, first_index: int, token_ids: Any, chain: Any, finish: Any) -> Any:
        return real_read(reader, first_index, token_ids, None, finish)

    def confirm(reader: BranchReader, *journal: Any) -> bool:
        reader.note_confirmed()
        return True

    BranchReader.go_to_place, BranchReader.read_run = go_to_place, read_run
    BranchReader.find_history = BranchReader.confirm = confirm


def deliver_twice() -> None:
    """The SDK attaches where it was first, and does not know what it has delivered since."""

    def accept(receiver: StreamReceiver, event: Any) -> Any:
        receiver.resume_token = receiver.resume_token or event.resume_token
        receiver.done |= event.finished is not None
        return event

    StreamReceiver.accept = accept


def ignore_cancel() -> None:
    """Nobody stops a sequence that runs and was cancelled."""

    async def stop(dispatcher: Dispatcher, *args: Any) -> None:
        pass

    Dispatcher._stop_running = Dispatcher._end_cancelled = stop
    real = memory_journal.append

    def append(*args: Any) -> AppendReply:
        reply = real(*args)
        return replace(reply, status=AppendStatus.OK) if reply.status is AppendStatus.OK_CANCEL else reply

    memory_store.append = append


def overlook_pictures() -> None:
    """Blocks with other pictures have the same hashes."""
    for module in (sequence, worker_pool):
        module.shown = lambda pictures, start, end: b""


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        append_without_fence,
        take_without_epoch,
        send_before_journal,
        forget_detach,
        detach_everybody,
        no_sweep,
        claims_never_end,
        requeue_nothing,
        believe_every_past,
        deliver_twice,
        ignore_cancel,
        overlook_pictures,
    )
}
