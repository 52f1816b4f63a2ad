"""What may be written, and how branches and sequences end."""

from octavo.request.ids import Incarnation
from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import Finish

W1, W2 = Incarnation("worker1"), Incarnation("worker2")


async def test_appends_are_checked_for_epoch_index_and_content(bench, new):
    seq_id, epoch = new().seq_id, await bench.run(new())

    async def append(first, tokens, at=epoch, owner=W1, **more):
        reply = await bench.append(seq_id, at, first, tokens, owner=owner, **more)
        return reply.status.name, reply.length

    assert await append(0, [7, 2**32 - 1]) == ("OK", 2)
    assert await append(0, [7, 2**32 - 1]) == ("DUP", 2)
    assert await append(1, [5]) == ("CONFLICT", 2)
    assert await append(3, [5]) == ("GAP", 2)
    assert await append(2, [5], epoch + 1) == await append(2, [5], epoch - 1) == ("FENCED", 2)
    assert await append(2, [5], owner=W2) == ("FENCED", 2)  # after a take whose reply was lost
    assert await append(1, [2**32 - 1, 9]) == ("OK", 3)  # what is new of an overlapping chunk
    assert await append(3, [1] * 62) == ("CONFLICT", 3)  # beyond max_tokens
    assert await append(1, [], finish=FinishReason.STOP) == ("CONFLICT", 3)  # an end before the end
    await bench.store.cancel(seq_id)
    assert await append(3, [4]) == ("OK_CANCEL", 4)
    assert await append(4, [6], finish=FinishReason.STOP) == ("OK_CANCEL", 5)
    assert await append(4, [6], finish=FinishReason.STOP) == ("DUP", 5)
    assert await append(5, [6]) == ("CLOSED", 5)
    snapshot = await bench.store.read(seq_id, from_indexes=[3])
    assert snapshot.outputs == ((4, 6),)
    assert snapshot.record.state is SequenceState.DONE


async def test_a_stop_string_moves_the_end_back(bench, new):
    seq_id, epoch = new().seq_id, await bench.run(new(num_branches=2))
    for branch in (0, 1):
        await bench.append(seq_id, epoch, 0, [1, 2, 3], branch=branch, finish=FinishReason.LENGTH, score=-3.0)
    for _ in range(2):
        assert await bench.store.finish(Finish(seq_id, FinishReason.STOP, branch=0, length=2, score=-2.5))
    assert await bench.store.finish(Finish(seq_id, FinishReason.LENGTH, branch=1, length=3))
    record = await bench.record(seq_id)
    assert (record.state, record.finishes) == (SequenceState.DONE, (FinishReason.STOP, FinishReason.LENGTH))
    assert (record.final_lengths, record.scores) == ((2, 3), (-2.5, -3.0))


async def test_an_owner_s_end_is_of_its_epoch(bench, new):
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.crash(seq_id, epoch, W2)
    # a retry is told the same, and a stale owner is not believed before or after
    for at, ends in ((epoch, False), (epoch + 1, True), (epoch + 1, True), (epoch, False)):
        assert await bench.store.finish(Finish(seq_id, FinishReason.ERROR, failure="{}", epoch=at)) == ends
        assert (await bench.record(seq_id)).state.ended or not ends
    assert (await bench.record(seq_id)).state is SequenceState.FAILED


async def test_a_sequence_ends_with_its_last_branch(bench, new):
    seq_id, epoch = new().seq_id, await bench.run(new(num_branches=3))
    await bench.append(seq_id, epoch, 0, [1, 2], finish=FinishReason.LENGTH)
    await bench.append(seq_id, epoch, 0, [1, 2, 3], branch=1)
    assert await bench.store.finish(Finish(seq_id, FinishReason.STOP, branch=1, length=2))
    assert not await bench.store.finish(Finish(seq_id, FinishReason.STOP, branch=2, length=1))  # it is empty
    assert not await bench.store.finish(Finish(seq_id, FinishReason.STOP, branch=3))  # no such branch
    assert (await bench.record(seq_id)).state is SequenceState.RUNNING
    assert await bench.store.finish(Finish(seq_id, FinishReason.ERROR, failure='{"reason": "X"}'))
    record = await bench.record(seq_id)
    assert record.finishes == (FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR)
    assert (record.num_tokens, record.final_lengths) == ((2, 3, 0), (2, 2, 0))
    assert (record.state, record.failure) == (SequenceState.FAILED, '{"reason": "X"}')
    assert await bench.store.finish(Finish(seq_id, FinishReason.LENGTH, branch=0))
    assert not await bench.store.finish(Finish(seq_id, FinishReason.STOP, branch=0))
