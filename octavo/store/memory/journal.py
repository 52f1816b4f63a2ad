"""What may be written into the journal of a branch.

Only the owner at the record's epoch may write, and only at the end. The owner may send the same tokens again.
"""

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Record, SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import AppendItem, AppendReply, AppendStatus, Finish
from octavo.store.memory.state import MemoryState, StoredSequence
from octavo.store.memory.suspects import count_proof, note_progress


def append(state: MemoryState, owner: Incarnation, item: AppendItem) -> AppendReply:
    stored = state.get(item.seq_id)
    if stored is None:
        return AppendReply(AppendStatus.GONE)
    record = stored.record
    if item.branch >= record.num_branches:
        return AppendReply(AppendStatus.CONFLICT)
    journal = stored.journals[item.branch]
    length, stop = len(journal), item.first_index + len(item.token_ids)
    if fenced(record, owner, item.epoch):
        return AppendReply(AppendStatus.FENCED, length)

    finished = record.finishes[item.branch]
    open_ = record.state is SequenceState.RUNNING and finished is FinishReason.NONE
    if item.first_index > length:
        return AppendReply(AppendStatus.GAP if open_ else AppendStatus.CLOSED, length)
    num_known = min(stop, length) - item.first_index
    if journal[item.first_index : item.first_index + num_known] != list(item.token_ids[:num_known]):
        return AppendReply(AppendStatus.CONFLICT, length)

    nothing_new = stop <= length
    if nothing_new and item.token_ids and not item.finish:
        return AppendReply(AppendStatus.DUP, length)
    if stop == length and item.finish and item.finish == finished:
        return AppendReply(AppendStatus.DUP, length)
    if not open_:
        return AppendReply(AppendStatus.CLOSED, length)
    if stop > record.max_tokens or (stop < length and item.finish):
        return AppendReply(AppendStatus.CONFLICT, length)

    fresh = item.token_ids[num_known:]
    journal.extend(fresh)
    if record.crashes and fresh:
        count_proof(state, stored, len(fresh))
    record.cached_tokens = item.cached_tokens or record.cached_tokens
    if item.finish:
        score = None if item.score is None or item.score != item.score else item.score  # NaN: no score
        end = Finish(item.seq_id, item.finish, item.branch, failure=item.failure, score=score)
        state.finish(stored, end)
    return AppendReply(AppendStatus.OK_CANCEL if record.cancel else AppendStatus.OK, len(journal))


def progress(state: MemoryState, seq_id: SequenceId, epoch: int, owner: Incarnation, num_tokens: int) -> AppendStatus:
    stored = state.get(seq_id)
    if stored is None:
        return AppendStatus.GONE
    if fenced(stored.record, owner, epoch):
        return AppendStatus.FENCED
    if stored.record.state.ended:
        return AppendStatus.CLOSED
    note_progress(state, stored, num_tokens)
    return AppendStatus.OK_CANCEL if stored.record.cancel else AppendStatus.OK


def fenced(record: Record, owner: Incarnation, epoch: int) -> bool:
    """Whether this worker does not own the sequence at this epoch.

    The epoch alone does not tell: after a take whose reply was lost, two workers may believe that they own it.
    """
    return record.epoch != epoch or record.owner != owner or record.state is SequenceState.QUEUED


def of_this_epoch(stored: StoredSequence, finish: Finish) -> bool:
    """Whether an end that was decided by an owner, or on behalf of one, is of the record's epoch."""
    return finish.epoch is None or finish.epoch == stored.record.epoch
