"""How a sequence moves to another owner without a stop: by a migration, which has a number within its epoch.

A record keeps the highest number of its epoch that a migration was begun or aborted with (`mig_number`), the target of
that migration while it is under way (`mig_to`), and the number of the migration that began the epoch (`last_mig`).
"""

from collections.abc import Sequence

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Record, SequenceState
from octavo.store.calls import MigrateReply, MigrateStatus
from octavo.store.memory.ownership import hand_over
from octavo.store.memory.state import MemoryState


def mig_begin(state: MemoryState, seq_id: SequenceId, epoch: int, number: int, target: Incarnation) -> MigrateReply:
    stored = state.get(seq_id)
    if stored is None:
        return MigrateReply(MigrateStatus.GONE)
    record = stored.record
    if refused := not_running(record, epoch):
        return refused
    if under_way(record, number, target):
        return MigrateReply(MigrateStatus.SAME, epoch)
    if outdated(record, number):
        return MigrateReply(MigrateStatus.OUTDATED, epoch)
    record.mig_number, record.mig_to = number, target
    state.note(stored, "migrating", target)
    return MigrateReply(MigrateStatus.OK, epoch)


def mig_commit(
    state: MemoryState, seq_id: SequenceId, epoch: int, number: int, target: Incarnation, num_tokens: Sequence[int]
) -> MigrateReply:
    """Makes the target the owner. The target calls this when it holds all blocks and tokens."""
    stored = state.get(seq_id)
    if stored is None:
        return MigrateReply(MigrateStatus.GONE)
    record = stored.record
    if committed(record, epoch, number) and record.owner == target:
        return MigrateReply(MigrateStatus.SAME, record.epoch)
    if refused := not_running(record, epoch):
        return refused
    if not under_way(record, number, target):
        return MigrateReply(MigrateStatus.NO_MIGRATION, epoch)
    if [len(journal) for journal in stored.journals] != list(num_tokens):
        return MigrateReply(MigrateStatus.GAP, epoch)
    state.note(stored, "migrated", target)
    hand_over(state, stored, target, take_id="", migration=number)
    return MigrateReply(MigrateStatus.OK, record.epoch)


def mig_abort(state: MemoryState, seq_id: SequenceId, epoch: int, number: int) -> MigrateReply:
    """Uses up the number, so that this migration can be neither committed nor begun any more. The source calls this."""
    stored = state.get(seq_id)
    if stored is None:
        return MigrateReply(MigrateStatus.GONE)
    record = stored.record
    if committed(record, epoch, number):
        return MigrateReply(MigrateStatus.COMMITTED, record.epoch)
    if refused := not_running(record, epoch):
        return refused
    if number >= record.mig_number:
        if record.mig_to:
            state.note(stored, "stayed", record.owner)
        record.mig_number, record.mig_to = number, Incarnation("")
    return MigrateReply(MigrateStatus.ABORTED, epoch)


def under_way(record: Record, number: int, target: Incarnation) -> bool:
    return record.mig_number == number and record.mig_to == target != ""


def outdated(record: Record, number: int) -> bool:
    """Whether this number, or a higher one, was used in this epoch: a call that comes late begins nothing."""
    return number <= record.mig_number


def committed(record: Record, epoch: int, number: int) -> bool:
    """Whether the migration of this number has made the epoch after `epoch`."""
    return record.epoch == epoch + 1 and record.last_mig == number


def not_running(record: Record, epoch: int) -> MigrateReply | None:
    """The reply that refuses a call, unless the sequence runs at this epoch; else None."""
    if record.epoch != epoch or record.state is SequenceState.QUEUED:
        return MigrateReply(MigrateStatus.FENCED, record.epoch)
    return MigrateReply(MigrateStatus.CLOSED, record.epoch) if record.state.ended else None
