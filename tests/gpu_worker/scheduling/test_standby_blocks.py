"""Which blocks of which sequences a buddy is to have, and what is kept of them."""

from dataclasses import replace

import pytest
from scheduler_bench import GREEDY, Bench

from gpu_worker.scheduling.block_exchange import BlockExchange
from gpu_worker.scheduling.standby_blocks import HistoryKey, StandbyBlocks
from octavo.request.errors import OutOfBlocks
from octavo.request.hashing import block_hashes
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
