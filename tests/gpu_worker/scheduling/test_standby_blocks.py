"""Which blocks of which sequences a buddy is to have, and what is kept of them."""

from dataclasses import replace

import pytest
from scheduler_bench import GREEDY, Bench

from gpu_worker.scheduling.block_exchange import BlockExchange
from gpu_worker.scheduling.standby_blocks import HistoryKey, LastBlocks, SentBlock, StandbyBlocks
from octavo.request.errors import OutOfBlocks
from octavo.request.hashing import block_hash, block_hashes
from octavo.request.ids import BlockHash, SequenceId

LONG = replace(GREEDY, max_tokens=40)


def key(name: str, branch: int = 0) -> HistoryKey:
    return HistoryKey(SequenceId(name), 1, branch)


def test_a_history_has_what_is_sealed_and_then_what_is_new() -> None:
    bench = Bench()
    standby = StandbyBlocks(bench.workload)
    sequence = bench.admit("a", 13, LONG)
    assert standby.histories(8, {}) == {}, "nothing of it is computed"
    bench.step()
    tokens = sequence.branches[0].tokens
    found = standby.histories(8, {})
    assert found == {key("a"): block_hashes(sequence.root, tokens[:13], 4)}
    assert len(found[key("a")]) == 3
    for _ in range(7):
        bench.step()
    assert standby.histories(8, {key("a"): 3}) == {key("a"): block_hashes(sequence.root, tokens[:-1], 4)[3:]}
    assert standby.histories(len(tokens) + 1, {}) == {}, "it is too short"
    bench.scheduler.swap(SequenceId("a"), 1, "out")
    assert standby.histories(8, {key("a"): 3}) == {key("a"): []}, "it keeps its history without its blocks"
    bench.scheduler.end_holds()
    bench.finish()
    assert standby.histories(1, {}) == {}


@pytest.mark.parametrize(
    ("params", "num_branches", "num_blocks"),
    [
        (replace(LONG, n=3, best_of=3, temperature=0.5, seed=1), 3, 5),
        (replace(LONG, logprobs=0), 1, 3),
        (replace(LONG, n=1, best_of=2, temperature=0.5, seed=1), 2, 3),
        (replace(LONG, prompt_logprobs=0), 1, 0),
        (replace(LONG, beam_width=2), 0, 0),
    ],
    ids=["branches", "log probabilities", "ranked", "scores of the prompt", "beams"],
)
def test_nothing_is_named_that_a_replay_would_not_use(params, num_branches, num_blocks):
    """13 tokens of prompt fill three blocks. What is scored again is computed again."""
    bench = Bench()
    bench.admit("a", 13, params)
    for _ in range(8):
        bench.step()
    found = StandbyBlocks(bench.workload).histories(8, {})
    assert [len(hashes) for hashes in found.values()] == [num_blocks] * num_branches


def test_blocks_to_keep_take_neither_rows_nor_what_others_need_or_keep() -> None:
    bench = Bench(runner={"num_blocks": 20}, max_batch_sequences=1)
    exchange, standby, cache = BlockExchange(bench.workload), StandbyBlocks(bench.workload), bench.workload.tables.cache
    bench.admit("a", 13, LONG)
    bench.step()
    wanted = [BlockHash(bytes([number]) * 16) for number in range(1, 21)]
    standby.keep(wanted, [])
    with pytest.raises(OutOfBlocks):
        exchange.hold([wanted[:4]])
    held = exchange.hold([wanted[:10]], to_keep=True)
    exchange.seal(held, range(10))
    exchange.release(held)
    assert cache.num_idle_wanted == 10 and standby.num_known([wanted, wanted[5:], wanted[12:]]) == [10, 5, 0]
    with pytest.raises(OutOfBlocks):
        exchange.hold([wanted[10:17]], to_keep=True)
    exchange.release(exchange.hold([wanted[10:15]], to_keep=True))
    bench.finish()
    assert cache.num_idle_wanted == 20 - 13, "the sequence has needed 13 blocks, and no more were given up for it"
    standby.keep([], wanted)
    assert not cache.num_idle_wanted and not cache.standby


def read(block: int) -> bytes:
    return b"block %d" % block


def test_the_last_blocks_are_read_with_the_tokens_that_are_computed_in_them() -> None:
    bench = Bench()
    standby = StandbyBlocks(bench.workload)
    sequence = bench.admit("a", 13, LONG)
    branch = sequence.branches[0]
    bench.step()
    assert standby.read_last(key("a"), 3, 3, 1, read).num_in_tail == 1
    bench.step()
    hashes = block_hashes(sequence.root, branch.tokens, 4)
    full = [SentBlock(hashes[index], read(branch.blocks[index])) for index in range(3)]
    tail = SentBlock(block_hash(sequence.root, hashes[2], branch.tokens[12:14]), read(branch.blocks[3]))
    nothing = LastBlocks([])
    assert standby.read_last(key("a"), 3, 3, 2, read) == LastBlocks([], tail, 2)
    assert standby.read_last(key("a"), 1, 3, 2, read) == LastBlocks(full[1:], tail, 2)
    assert standby.read_last(key("a"), 2, 3, 3, read) == LastBlocks(full[2:]), "the tail has two tokens"
    assert standby.read_last(key("a"), 2, 2, 1, read) == nothing, "the block after two is full"
    assert standby.read_last(key("a"), 0, 4, 1, read) == nothing, "three are sealed, as after a preemption"
    assert standby.read_last(key("b"), 0, 3, 1, read) == nothing
    assert standby.read_last(key("a")._replace(epoch=2), 0, 3, 1, read) == nothing
    assert standby.read_last(key("a", branch=1), 0, 3, 1, read) == nothing
    bench.scheduler.swap(SequenceId("a"), 1, "out")
    assert standby.read_last(key("a"), 0, 3, 1, read) == nothing, "it is not on the device"


@pytest.mark.parametrize(
    ("params", "runner"),
    [(replace(LONG, logprobs=0), {}), (replace(LONG, prompt_logprobs=0), {}), (LONG, {"keeps_state": True})],
    ids=["log probabilities", "scores of the prompt", "a state"],
)
def test_no_block_is_read_that_a_replay_would_not_use(params, runner):
    bench = Bench()
    bench.workload.info = replace(bench.workload.info, **runner)
    standby = StandbyBlocks(bench.workload)
    bench.admit("a", 13, params)
    for _ in range(3):
        bench.step()
    assert all(standby.read_last(key("a"), 0, num_blocks, 1, read) == LastBlocks([]) for num_blocks in range(5))


def keep_history(standby: StandbyBlocks, exchange: BlockExchange, hashes: list[BlockHash]) -> None:
    standby.keep(hashes, [])
    held = exchange.hold([hashes], to_keep=True)
    exchange.seal(held, range(len(hashes)))
    exchange.release(held)


@pytest.mark.parametrize(
    ("params", "num_in_tail", "num_to_compute"),
    [
        (LONG, 0, 3),
        (LONG, 1, 2),
        (LONG, 2, 1),
        (LONG, 3, 3),  # it has a token that the journal has not
        (replace(LONG, logprobs=0), 2, 7),  # all after the prompt's two blocks, for the scores
    ],
)
def test_a_branch_begins_in_the_middle_of_the_longest_tail_that_is_its_own(params, num_in_tail, num_to_compute):
    """15 tokens: three blocks, and three tokens behind them of which the last one is computed in any case."""
    bench = Bench()
    exchange, standby, cache = BlockExchange(bench.workload), StandbyBlocks(bench.workload), bench.workload.tables.cache
    prompt, output = list(range(1, 11)), [7, 8, 9, 10, 11]
    sequence = bench.new("a", prompt, params, outputs=[output])
    tokens = [*prompt, *output, 12]
    hashes = block_hashes(sequence.root, tokens[:12], 4)
    keep_history(standby, exchange, hashes)
    written: list[tuple[int, bytes]] = []
    if num_in_tail:
        name = block_hash(sequence.root, hashes[-1], tokens[12 : 12 + num_in_tail])
        tail = SentBlock(name, b"bytes")
        assert standby.put_tail(tail, [], lambda *each: written.append(each))
        assert cache.tails == {name} and not set(cache.hottest(bench.workload.tables.device.refs, 9)) & cache.tails
    assert bench.scheduler.admit(sequence).admitted
    plan, _ = bench.step()
    assert plan.num_tokens == num_to_compute
    if num_in_tail in (1, 2) and params is LONG:
        assert sequence.branches[0].blocks[3] == written[0][0] and not cache.tails
    bench.finish()


def test_full_blocks_that_come_are_known_and_take_no_room_of_others() -> None:
    bench = Bench(runner={"num_blocks": 5})
    standby, cache = StandbyBlocks(bench.workload), bench.workload.tables.cache
    blocks = [SentBlock(BlockHash(bytes([number]) * 16), bytes([number])) for number in range(1, 7)]
    names = [each.name for each in blocks]
    standby.keep(names, [])
    written: dict[int, bytes] = {}
    assert standby.put_blocks(blocks[:2], written.__setitem__)
    assert standby.put_blocks(blocks[1:4], written.__setitem__)
    assert [written[cache.find(each.name)] for each in blocks[:4]] == [each.content for each in blocks[:4]]
    assert standby.put_blocks(blocks[4:5], written.__setitem__)
    assert standby.num_known([names]) == [5] and not cache.tails and cache.num_idle_wanted == 5
    assert not standby.put_blocks(blocks[5:], written.__setitem__), "all blocks are kept"
    standby.keep([], names)
    bench.workload.tables.device.check_blocks([])


def test_a_tail_takes_the_place_of_the_one_before_and_of_nothing_else() -> None:
    bench = Bench(runner={"num_blocks": 8})
    exchange, standby, tables = BlockExchange(bench.workload), StandbyBlocks(bench.workload), bench.workload.tables
    names = [BlockHash(bytes([number]) * 16) for number in range(1, 9)]
    keep_history(standby, exchange, names[:6])
    for number, name in enumerate(names[6:]):
        ended = [names[5 + number]] if number else []
        assert standby.put_tail(SentBlock(name, b""), ended, lambda *_: None)
        assert (tables.cache.tails, tables.device.num_free) == ({name}, 1)
    keep_history(standby, exchange, names[6:7])
    assert not standby.put_tail(SentBlock(BlockHash(bytes(16)), b""), [], lambda *_: None), "all blocks are kept"
    standby.keep([], names)
    bench.admit("a", 20)
    bench.finish()
    assert not tables.cache.tails


def test_routers_and_the_host_pool_hear_nothing_of_tails_and_their_names_end_with_them() -> None:
    bench = Bench(runner={"num_blocks": 8})
    cache, device = bench.workload.tables.cache, bench.workload.tables.device
    name, other = (BlockHash(bytes([number]) * 16) for number in (1, 2))
    standby = StandbyBlocks(bench.workload)
    assert standby.put_tail(SentBlock(name, b""), [], lambda *_: None)
    assert cache.num_idle_wanted == 1 and not cache.next_evicted(8)
    device.reserve(8).release()  # the tail is evicted
    assert cache.find(name) is None and cache.standby == {name}
    assert standby.put_tail(SentBlock(other, b""), [name], lambda *_: None)
    device.check_blocks([])
    assert cache.tails == cache.standby == {other}
    assert (cache.take_events(), cache.digest, cache.block_hashes()) == ([], 0, [])
