"""Classic bugs, by name, which a run can be given: the simulation must find each of them."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import octavo.store.memory.journal as memory_journal
import octavo.store.memory.store as memory_store
from gpu_worker.journal.journal_writer import JournalWriter
from gpu_worker.migration.standby.standby_buddy import StandbyBuddy
from gpu_worker.migration.target.migration_target import MigrationTarget
from gpu_worker.scheduling.state import sequence
from octavo.client.receiver import StreamReceiver
from octavo.request.ids import SequenceId
from octavo.request.record import SequenceState
from octavo.store.calls import AppendReply, AppendStatus
from octavo.store.memory import MemoryStore
from octavo.wire.internal import admission_of_record
from router.fleet import worker_pool
from router.placing.dispatcher import Dispatcher
from router.streaming.branch_reader import BranchReader
from simulation.loop import HOST


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


def no_sweep() -> None:
    """No router looks for sequences whose owner has died unseen."""

    async def sweep(dispatcher: Dispatcher) -> None:
        await asyncio.sleep(3600)

    Dispatcher._sweep = sweep


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


def buddy_goes_on() -> None:
    """A buddy that has heard nothing of an owner for a second goes on with its sequences, without a take."""
    real = StandbyBuddy.go_round

    async def go_round(buddy: StandbyBuddy) -> None:
        await real(buddy)
        target = HOST.get().program.target
        for each in buddy.histories._owners.values():
            if time.monotonic() - each.called_at > 1.0:
                for seq_id, _ in list(each.histories):
                    await go_on(target, seq_id)

    async def go_on(target: MigrationTarget, seq_id: SequenceId) -> None:
        known = await target._store.read(seq_id, prompt=True)
        if known is not None and known.record.state is SequenceState.RUNNING:
            from_start = [0] * known.record.num_branches
            whole = await target._store.read(seq_id, prompt=True, from_indexes=from_start)
            await target._admit(admission_of_record(whole, epoch=known.record.epoch, age_ms=0), "")

    StandbyBuddy.go_round = go_round


def weakened(name: str) -> Callable[[], None]:
    """One of the weaker stores that the model checker has."""

    def apply() -> None:
        from modelcheck.weakenings import WEAKENINGS

        for where, function, weaker in WEAKENINGS[name].patches():
            setattr(where, function, weaker)

    return apply


OWN = (send_before_journal, forget_detach, no_sweep, requeue_nothing, believe_every_past)
OWN += (deliver_twice, ignore_cancel, overlook_pictures, buddy_goes_on)
BUGS: dict[str, Callable[[], None]] = {bug.__name__: bug for bug in OWN} | {
    "append_without_fence": weakened("append: neither epoch nor owner is compared"),
    "take_without_epoch": weakened("take: the epoch does not rise"),
    "detach_everybody": weakened("detach: every router is detached"),
    "claims_never_end": weakened("sweep: a claim does not end"),
}
