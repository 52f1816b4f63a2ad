"""Sealed blocks of a sequence are at its buddy while it runs, which goes on from them after the owner's death."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from effort import some
from waiting import until
from worker_pair import Follower, PairedWorker, WorkerPair, greedy, worker_pair

from gpu_worker.migration.calls.standby_calls import HistoryState, NamedHistory, StandbyRequest, num_sent_bytes
from gpu_worker.migration.standby import standby_buddy, standby_owner
from gpu_worker.migration.standby.covered_sequences import CoveredBranch
from gpu_worker.migration.standby.standby_owner import FoundBlocks
from gpu_worker.scheduling.standby_blocks import LastBlocks, SentBlock
from octavo.process import failpoints
from octavo.request.errors import InvalidArgument, Mismatch
from octavo.request.ids import BlockHash, Incarnation, SequenceId
from octavo.store.calls import TakeReason, TakeRequest

SIZE = 4
LONG = greedy(400)
PROMPT = tuple(range(1, 102))


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_owner, "LONGEST_ROUND_S", 0.05)
    monkeypatch.setattr(standby_owner, "CANDIDATES_S", 0.1)
    monkeypatch.setattr(standby_owner, "AVOID_S", 0.3)
    monkeypatch.setattr(standby_buddy, "RETRY_S", 0.1)


@pytest.fixture
async def pair() -> AsyncIterator[WorkerPair]:
    async with worker_pair(standby=True, standby_tokens=16, step_s=0.01) as made:
        yield made


def num_kept(worker: PairedWorker) -> int:
    """Blocks that are here for standbys."""
    cache = worker.worker.workload.tables.cache
    return sum(cache.find(each) is not None for each in list(cache.standby))


async def test_sealed_blocks_are_at_the_buddy_while_the_sequence_runs(pair: WorkerPair) -> None:
    short = await pair.run(greedy(8), prompt=PROMPT[:3], num_tokens=8)
    await pair.check_end(short, greedy(8), prompt=PROMPT[:3])
    assert not pair.b.worker.standby_buddy.histories.num_blocks, "a short sequence has none"
    follower = await pair.run(LONG, prompt=PROMPT)
    await until(lambda: num_kept(pair.b) >= 30)
    num_tokens = (await pair.record(follower.seq_id)).num_tokens[0]
    assert num_tokens < 400, "it still runs"
    assert num_kept(pair.b) <= (len(PROMPT) + num_tokens) // SIZE + 1
    await until(lambda: pair.a.worker.standby_owner.sequences.num_covered == 1)  # the buddy says so in its next answer
    assert not pair.b.runner.num_steps, "the buddy runs nothing"
    await pair.check_end(follower, LONG, prompt=PROMPT)
    await until(lambda: not pair.b.worker.standby_buddy.histories.num_blocks)
    await until(lambda: not pair.b.worker.workload.tables.cache.standby)  # the keep ends with the sequence
    await pair.has_let_go()


async def take(pair: WorkerPair, follower: Follower, worker: PairedWorker, hint: tuple[str, int] = ("", 0)) -> None:
    """What a router does when the owner is lost."""
    request = TakeRequest(follower.seq_id, 1, worker.incarnation, "again", TakeReason.REFUSED)
    taken = await pair.store.take_ownership(request)
    pair.tasks[-1].cancel()
    await follower.done.wait()
    follower.done.clear()
    await pair.schedule(follower, worker, taken.epoch, hint)


@pytest.mark.parametrize("num_branches", [1, 3])
async def test_the_buddy_computes_little_again_and_the_tokens_are_the_same(pair: WorkerPair, num_branches: int) -> None:
    params = greedy(200, n=num_branches, best_of=num_branches, temperature=0.8)
    follower = await pair.run(params, prompt=PROMPT, num_tokens=40)
    sequences = pair.a.worker.standby_owner.sequences
    await until(lambda: 0 < sequences.num_sealed_blocks <= sequences.num_held_blocks + 2 * num_branches)
    await take(pair, follower, pair.b)
    await pair.check_end(follower, params, prompt=PROMPT)
    assert pair.b.runner.num_prefill <= 12 * SIZE * num_branches
    assert (await pair.record(follower.seq_id)).epoch == 2


async def test_a_worker_in_place_of_the_buddy_gets_prompt_and_output_from_it(pair: WorkerPair) -> None:
    params = greedy(300)
    third = await pair.add("c")
    follower = await pair.run(params, prompt=PROMPT, num_tokens=60)
    sequences = pair.a.worker.standby_owner.sequences
    await until(lambda: sequences.num_held_blocks * SIZE > len(PROMPT) + 40)
    num_held = sequences.num_held_blocks
    await take(pair, follower, third, (pair.b.incarnation, num_held * SIZE))
    await pair.check_end(follower, params, prompt=PROMPT)
    await until(lambda: third.worker.fetcher.num_fetched == num_held)


async def test_another_worker_is_the_buddy_where_the_first_has_no_room(pair: WorkerPair) -> None:
    pair.b.worker.standby_buddy.histories._most_blocks = 3
    third = await pair.add("c", standby=True, standby_tokens=16)
    followers = [await pair.run(LONG, prompt=(number, *PROMPT)) for number in range(200, 203)]
    await until(lambda: num_kept(third) >= 75)
    assert num_kept(pair.b) <= 3
    assert pair.b.worker.standby_buddy.num_refused
    for number, follower in enumerate(followers, 200):
        await pair.check_end(follower, LONG, prompt=(number, *PROMPT))


async def test_a_worker_without_the_setting_is_no_buddy_and_disturbs_nothing() -> None:
    async with worker_pair(standby_tokens=16) as pair:
        owner = await pair.add("owner", standby=True, standby_tokens=16, step_s=0.01)
        follower = await pair.run(LONG, prompt=PROMPT, on=owner, num_tokens=40)
        await until(lambda: owner.worker.standby_owner.num_failed > 0)
        await pair.check_end(follower, LONG, prompt=PROMPT)
        assert not owner.worker.standby_owner.sequences.num_covered


async def test_a_buddy_that_drains_or_dies_is_replaced(pair: WorkerPair) -> None:
    params = greedy(800)
    follower = await pair.run(params, prompt=PROMPT)
    await until(lambda: num_kept(pair.b) >= 25)
    third = await pair.add("c", standby=True, standby_tokens=16)
    pair.b.worker.drain.begin(60.0)
    await until(lambda: num_kept(third) >= 25)
    sequences = pair.a.worker.standby_owner.sequences
    assert sequences.num_blocks_by_buddy().keys() == {Incarnation(third.incarnation)}
    await pair.check_end(follower, params, prompt=PROMPT)


async def test_blocks_that_run_short_at_the_buddy_go_to_its_own_sequences_and_come_again() -> None:
    async with worker_pair(standby=True, standby_tokens=16, step_s=0.01, num_blocks=96) as pair:
        follower = await pair.run(greedy(250), prompt=PROMPT[:40])
        await until(lambda: num_kept(pair.b) >= 12)
        own = greedy(100)
        mine = [await pair.run(own, prompt=(number, *PROMPT[:90]), on=pair.b) for number in range(300, 303)]
        for number, each in enumerate(mine, 300):
            await pair.check_end(each, own, prompt=(number, *PROMPT[:90]))
        await pair.check_end(follower, greedy(250), prompt=PROMPT[:40])
        pair.b.worker.standby_buddy.histories.check_uses()
        await pair.has_let_go()


@pytest.mark.parametrize(
    "place", some(["source.pinned", "source.opened", "source.sent", "target.seal"], ["source.opened", "target.seal"])
)
async def test_a_fetch_that_fails_is_made_again_and_disturbs_nothing(pair: WorkerPair, place: str) -> None:
    armed = failpoints.arm(place, "error")
    follower = await pair.run(LONG, prompt=PROMPT)
    await armed.reached.wait()
    failpoints.disarm_all()
    await until(lambda: num_kept(pair.b) >= 30)
    await pair.check_end(follower, LONG, prompt=PROMPT)
    await pair.has_let_go()


async def test_the_blocks_outlive_their_owner(pair: WorkerPair) -> None:
    owner = await pair.add("owner", standby=True, standby_tokens=16, step_s=0.01)
    follower = await pair.run(LONG, prompt=PROMPT, on=owner)
    await until(lambda: max(num_kept(pair.a), num_kept(pair.b)) >= 30)
    buddy = max(pair.a, pair.b, key=num_kept)
    await asyncio.wrap_future(owner.worker.engine.control.pause())
    for task in owner.worker._watching:  # it says nothing more, as if it had died
        task.cancel()
    await asyncio.gather(*owner.worker._watching, return_exceptions=True)
    await asyncio.sleep(0.3)
    assert num_kept(buddy) >= 30
    await take(pair, follower, buddy)
    await pair.check_end(follower, LONG, prompt=PROMPT)
    assert buddy.runner.num_prefill <= 16 * SIZE
    change = buddy.worker.standby_buddy.histories.expire(float("inf"))
    assert change.ended and not buddy.worker.standby_buddy.histories.num_blocks


async def test_the_buddy_goes_on_in_the_middle_of_a_block(pair: WorkerPair) -> None:
    """It computes nothing again but the last token, which nobody has computed."""
    follower = await pair.run(LONG, prompt=PROMPT, num_tokens=40)
    control, sequences = pair.a.worker.engine.control, pair.a.worker.standby_owner.sequences
    await asyncio.wrap_future(control.pause())
    branch = pair.a.worker.workload.sequences[follower.seq_id].branches[0]
    while branch.num_computed % SIZE != SIZE - 1:
        num_computed = branch.num_computed
        control.grant_steps(1)
        await until(lambda before=num_computed: branch.num_computed > before)

    def is_there() -> bool:
        covered = sequences.next_tail(Incarnation(pair.b.incarnation))
        return covered is not None and covered[1].tail == (branch.num_computed // SIZE, SIZE - 1)

    await until(is_there)
    await until(lambda: sequences.num_held_blocks == sequences.num_sealed_blocks)
    await take(pair, follower, pair.b)
    await pair.check_end(follower, LONG, prompt=PROMPT)
    assert pair.b.runner.num_prefill == 1
    cache = pair.b.worker.workload.tables.cache
    assert not cache.tails & cache.standby


async def test_blocks_that_a_step_has_filled_come_with_the_call(pair: WorkerPair) -> None:
    """They need no fetch, which takes longer than it takes a client to see the tokens of that step."""
    follower = await pair.run(LONG, prompt=PROMPT, num_tokens=40)
    control, sequences = pair.a.worker.engine.control, pair.a.worker.standby_owner.sequences
    await asyncio.wrap_future(control.pause())
    await until(lambda: 0 < sequences.num_sealed_blocks == sequences.num_held_blocks)
    num_before = num_kept(pair.b)
    failpoints.arm("source.pinned", "error")  # no fetch brings anything
    control.grant_steps(0)
    await until(lambda: num_kept(pair.b) >= num_before + 20)
    failpoints.disarm_all()
    await pair.check_end(follower, LONG, prompt=PROMPT)
    await pair.has_let_go()


async def test_a_call_brings_no_blocks_while_the_limit_is_used_up(pair: WorkerPair) -> None:
    """Nor are they lost: they are fetched as the limit allows. What comes with calls is counted in it."""
    share, counted, sent = pair.a.worker.connections.share, list[int](), list[NamedHistory]()
    buddy = pair.b.worker.standby_buddy
    note_histories = buddy.note_histories

    async def noted(request: StandbyRequest) -> list[HistoryState]:
        sent.extend(request.histories)
        return await note_histories(request)

    buddy.note_histories = noted
    share.limiter.count_bytes = counted.append
    share._most = 0.0
    share.adjust()
    follower = await pair.run(LONG, prompt=PROMPT, num_tokens=40)
    await until(lambda: sum(len(each.hashes) for each in sent) >= 30)
    assert not num_sent_bytes(sent) and not num_kept(pair.b)
    share._most = None
    share.adjust()
    await until(lambda: num_sent_bytes(sent) > 0 and num_kept(pair.b) >= 30)
    await pair.check_end(follower, LONG, prompt=PROMPT)
    await pair.has_let_go()
    assert sum(counted) == num_sent_bytes(sent)


async def test_a_tail_that_comes_after_its_history_has_ended_is_not_kept(pair: WorkerPair) -> None:
    follower = await pair.run(LONG, prompt=PROMPT, num_tokens=40)
    cache = pair.b.worker.workload.tables.cache
    await until(lambda: bool(cache.tails))
    await pair.check_end(follower, LONG, prompt=PROMPT)
    await until(lambda: not cache.standby)
    await pair.has_let_go()


async def test_a_stream_without_tails_leaves_the_turn_to_others(pair: WorkerPair) -> None:
    scored = replace(LONG, logprobs=0)
    first = await pair.run(scored, prompt=PROMPT)
    second = await pair.run(LONG, prompt=PROMPT[1:])
    covered = pair.a.worker.standby_owner.sequences._sequences
    await until(lambda: sum(each.branches[0].tail_at > 0 for each in covered.values()) == 2)
    await pair.check_end(first, scored, prompt=PROMPT)
    await pair.check_end(second, LONG, prompt=PROMPT[1:])


async def test_a_tail_that_was_not_named_is_not_noted_as_sent(pair: WorkerPair) -> None:
    follower = await pair.run(LONG, prompt=PROMPT)
    owner = pair.a.worker.standby_owner
    await until(lambda: owner.sequences.num_held_blocks > 0)
    cut, last = CoveredBranch(), LastBlocks([], SentBlock(BlockHash(bytes(16)), b""), 3)
    await owner._tell(owner._told[Incarnation(pair.b.incarnation)], FoundBlocks(cut, last))
    assert cut.tail == (0, 0)
    await pair.check_end(follower, LONG, prompt=PROMPT)


async def test_a_history_that_is_named_in_part_brings_no_blocks(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would not be the last ones that the call names, and the buddy would refuse it."""
    follower = await pair.run(LONG, prompt=PROMPT)
    owner = pair.a.worker.standby_owner
    await until(lambda: owner.sequences.num_held_blocks > 0)
    [[branch]] = [sequence.branches.values() for sequence in owner.sequences._sequences.values()]
    branch.num_named = 0
    monkeypatch.setattr(standby_owner, "MOST_NAMED", 1)
    last = LastBlocks([SentBlock(branch.hashes[-1], bytes(pair.b.runner.info.bytes_per_block))])
    failed = owner.num_failed
    await owner._tell(owner._told[Incarnation(pair.b.incarnation)], FoundBlocks(branch, last))
    assert owner.num_failed == failed
    monkeypatch.undo()
    await pair.check_end(follower, LONG, prompt=PROMPT)


def call(pair: WorkerPair, number: int, content: bytes, name: bytes, full: bytes | None = None) -> StandbyRequest:
    info, first = pair.b.runner.info, BlockHash(b"0" * 16)
    blocks = [] if full is None else [SentBlock(first, full)]
    tail = SentBlock(BlockHash(name), content)
    histories = [NamedHistory(SequenceId("s" * 26), 0, 0, [first], blocks, tail)]
    return StandbyRequest(Incarnation("a"), info.fingerprint, info.layout, info.numerics, histories, number)


@pytest.mark.parametrize("field", ["fingerprint", "layout", "numerics"])
async def test_blocks_of_another_model_layout_or_class_are_not_taken(pair: WorkerPair, field: str) -> None:
    content = bytes(pair.b.runner.info.bytes_per_block)
    with pytest.raises(Mismatch):
        await pair.b.worker.standby_buddy.note_histories(
            replace(call(pair, 1, content, b"1" * 16, content), **{field: "another"})
        )
    assert not pair.b.worker.workload.tables.cache.num_idle


async def test_no_full_block_that_is_here_is_written_again(pair: WorkerPair) -> None:
    """Whatever a caller says that it holds: what was computed here, or has come first, stays."""
    buddy, size = pair.b.worker.standby_buddy, pair.b.runner.info.bytes_per_block
    await buddy.note_histories(call(pair, 1, b"1" * size, b"t" * 16, b"1" * size))
    await buddy.note_histories(call(pair, 2, b"2" * size, b"t" * 16, b"2" * size))
    cache = pair.b.worker.workload.tables.cache
    with pair.b.runner.block_memory.read_blocks([cache.find(BlockHash(b"0" * 16))]) as contents:
        assert [b"".join(each) for each in contents] == [b"1" * size]


async def test_a_call_that_was_overtaken_brings_no_block_and_each_block_is_whole(pair: WorkerPair) -> None:
    buddy, cache = pair.b.worker.standby_buddy, pair.b.worker.workload.tables.cache
    content = bytes(pair.b.runner.info.bytes_per_block)
    await buddy.note_histories(call(pair, 2, content, b"2" * 16))
    await buddy.note_histories(call(pair, 1, content, b"1" * 16))
    assert cache.tails == {b"2" * 16}
    with pytest.raises(InvalidArgument, match=r"histories\[0\].tail.content: 1 bytes, .* send the whole block"):
        await buddy.note_histories(call(pair, 3, b"x", b"3" * 16))
    with pytest.raises(InvalidArgument, match=r"histories\[0\].blocks\[0\].content: 1 bytes, .* send the whole block"):
        await buddy.note_histories(call(pair, 3, content, b"3" * 16, b"x"))
    [state] = await buddy.note_histories(call(pair, 3, content, b"3" * 16, content))
    assert state.num_held == 1
