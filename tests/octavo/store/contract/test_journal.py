"""What may be written, and how branches and sequences end."""

from typing import Any

from octavo.request.ids import Incarnation
from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import AppendItem, AppendStatus, Finish

W1, W2, W3, W4 = (Incarnation(f"worker{i}") for i in (1, 2, 3, 4))


async def test_appends_are_checked_for_epoch_index_and_content(bench: Any, new: Any) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())

    async def append(
        first: int, tokens: list[int], at: int = epoch, owner: Incarnation = W1, **more: Any
    ) -> tuple[AppendStatus, int]:
        [reply] = await bench.store.append_batch(owner, [AppendItem(seq_id, at, 0, first, tokens, **more)])
        return reply.status, reply.length

    assert await append(0, [7, 2**32 - 1]) == (AppendStatus.OK, 2)
    assert await append(0, [7, 2**32 - 1]) == (AppendStatus.DUP, 2)
    assert await append(1, [5]) == (AppendStatus.CONFLICT, 2)
    assert await append(3, [5]) == (AppendStatus.GAP, 2)
    assert await append(2, [5], epoch + 1) == (AppendStatus.FENCED, 2)
    assert await append(2, [5], epoch - 1) == (AppendStatus.FENCED, 2)
    assert await append(2, [5], owner=W2) == (AppendStatus.FENCED, 2)  # after a take whose reply was lost
    assert await append(1, [2**32 - 1, 9]) == (AppendStatus.OK, 3)  # what is new of an overlapping chunk
    assert await append(3, [1] * 62) == (AppendStatus.CONFLICT, 3)  # beyond max_tokens
    assert await append(1, [], finish=FinishReason.STOP) == (AppendStatus.CONFLICT, 3)  # an end before the end
    await bench.store.cancel(seq_id)
    assert await append(3, [4]) == (AppendStatus.OK_CANCEL, 4)
    assert await append(4, [6], finish=FinishReason.STOP) == (AppendStatus.OK_CANCEL, 5)
    assert await append(4, [6], finish=FinishReason.STOP) == (AppendStatus.DUP, 5)
    assert await append(5, [6]) == (AppendStatus.CLOSED, 5)
    snapshot = await bench.store.read(seq_id, from_indexes=[3])
    assert snapshot.outputs == ((4, 6),)
    assert snapshot.record.state is SequenceState.DONE


async def test_a_batch_answers_item_by_item(bench: Any, new: Any) -> None:
    epochs = {name: await bench.run(new(name, num_branches=2)) for name in "abcdefgh"}
    ids = {name: new(name).seq_id for name in epochs}
    items = [AppendItem(ids[name], epochs[name], branch, 0, [branch, 3]) for name in ids for branch in (0, 1)]
    items[3] = AppendItem(ids["b"], 9, 1, 0, [1])
    items.append(AppendItem(new("unknown").seq_id, 1, 0, 0, [1]))
    expected = [AppendStatus.OK] * 17
    expected[3], expected[16] = AppendStatus.FENCED, AppendStatus.GONE
    assert [reply.status for reply in await bench.store.append_batch(W1, items)] == expected
    assert await bench.store.append_batch(W1, []) == []
    assert (await bench.store.read(ids["h"], from_indexes=[0, 1])).outputs == ((0, 3), (3,))


async def test_a_stop_string_moves_the_end_back(bench: Any, new: Any) -> None:
    request = new(num_branches=2)
    epoch = await bench.run(request)
    for branch in (0, 1):
        item = AppendItem(request.seq_id, epoch, branch, 0, [1, 2, 3], FinishReason.LENGTH, score=-3.0)
        await bench.store.append_batch(W1, [item])
    assert await bench.store.finish(Finish(request.seq_id, FinishReason.STOP, branch=0, length=2, score=-2.5))
    assert await bench.store.finish(Finish(request.seq_id, FinishReason.STOP, branch=0, length=2, score=-2.5))
    assert await bench.store.finish(Finish(request.seq_id, FinishReason.LENGTH, branch=1, length=3))
    record = (await bench.store.read(request.seq_id)).record
    assert (record.state, record.finishes) == (SequenceState.DONE, (FinishReason.STOP, FinishReason.LENGTH))
    assert (record.final_lengths, record.scores) == ((2, 3), (-2.5, -3.0))


async def test_a_sequence_ends_with_its_last_branch(bench: Any, new: Any) -> None:
    request = new(num_branches=3)
    epoch = await bench.run(request)
    await bench.store.append_batch(W1, [AppendItem(request.seq_id, epoch, 0, 0, [1, 2], FinishReason.LENGTH)])
    await bench.store.append_batch(W1, [AppendItem(request.seq_id, epoch, 1, 0, [1, 2, 3])])
    assert await bench.store.finish(Finish(request.seq_id, FinishReason.STOP, branch=1, length=2))
    assert not await bench.store.finish(Finish(request.seq_id, FinishReason.STOP, branch=2, length=1))  # it is empty
    assert not await bench.store.finish(Finish(request.seq_id, FinishReason.STOP, branch=3))  # no such branch
    assert (await bench.store.read(request.seq_id)).record.state is SequenceState.RUNNING
    assert await bench.store.finish(Finish(request.seq_id, FinishReason.ERROR, failure='{"reason": "X"}'))
    record = (await bench.store.read(request.seq_id)).record
    assert record.finishes == (FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR)
    assert (record.num_tokens, record.final_lengths) == ((2, 3, 0), (2, 2, 0))
    assert (record.state, record.failure) == (SequenceState.FAILED, '{"reason": "X"}')
    assert await bench.store.finish(Finish(request.seq_id, FinishReason.LENGTH, branch=0))
    assert not await bench.store.finish(Finish(request.seq_id, FinishReason.STOP, branch=0))


async def test_an_owner_s_end_is_of_its_epoch(bench: Any, new: Any) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.crash(seq_id, epoch, W2)
    assert not await bench.store.finish(Finish(seq_id, FinishReason.ERROR, failure="{}", epoch=epoch))
    assert (await bench.store.read(seq_id)).record.state is SequenceState.RUNNING
    for _ in range(2):  # and a retry is told the same
        assert await bench.store.finish(Finish(seq_id, FinishReason.ERROR, failure="{}", epoch=epoch + 1))
    assert not await bench.store.finish(Finish(seq_id, FinishReason.ERROR, failure="{}", epoch=epoch))
    assert (await bench.store.read(seq_id)).record.state is SequenceState.FAILED
