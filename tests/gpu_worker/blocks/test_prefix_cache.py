"""Blocks that several share: computed once, hit by those who may, told of to whoever watches."""

import pytest
from scheduler_bench import Bench

from octavo.request.hashing import block_hashes
from octavo.request.ids import BlockHash


def test_a_second_prompt_hits_the_first_ones_blocks_and_its_output() -> None:
    bench = Bench()
    first = bench.admit("a", 9)
    bench.finish()
    chat = bench.admit("b", [*first.branches[0].tokens, 3, 3])
    plan, result = bench.step()
    assert chat.cached_tokens == 16  # 17 tokens of the first turn, the last of which was never computed
    assert plan.num_tokens == 19 - 16
    assert result.items[0].cached_tokens == 16


def test_a_prompt_that_several_share_is_computed_once() -> None:
    shared = [1 + i % 50 for i in range(41)]
    prompts = {name: [*shared, number, number] for number, name in enumerate("abcdef")}
    alone = Bench()
    bench = Bench(max_batch_tokens=64)
    for name, prompt in prompts.items():
        alone.admit(name, prompt)
        alone.finish()
        bench.admit(name, prompt)
    bench.step()
    assert bench.lengths == {"a": 43}  # and no one begins what this step brings
    bench.step()
    assert bench.lengths == {"a": 1} | dict.fromkeys("bcdef", 3)  # 40 of 43 tokens are in whole blocks
    bench.finish()
    assert bench.tokens == alone.tokens


def test_who_waits_for_a_shared_prompt_goes_on_where_it_ends() -> None:
    shared = [1 + i % 50 for i in range(40)]
    bench = Bench()
    bench.admit("first", [*shared, 1])
    bench.admit("other", 5)
    second = bench.admit("second", [*shared, 2])
    bench.step()
    assert set(bench.lengths) == {"first", "other"}
    bench.cancel("first")
    bench.finish()
    assert second.cached_tokens == 24 and len(bench.tokens["second.0"]) == 8  # what the first step computed


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_nobody_waits_for_a_prompt_of_another_tenant_or_where_classes_count_of_a_lower_class(policy: str) -> None:
    shared = [1 + i % 50 for i in range(60)]
    bench = Bench(policy=policy, max_batch_tokens=48)
    bench.admit("bulk", shared, priority=4)
    bench.step()  # a part of its prompt is computed
    bench.admit("default", shared)
    bench.admit("foreign", shared, root=b"x" * 32)
    bench.admit("late", shared, priority=4)
    bench.step()
    begun = set(bench.lengths)
    bench.finish()
    assert {len(tokens) for tokens in bench.tokens.values()} == {8}
    assert begun == {"bulk", "foreign"} | ({"default"} if policy == "priority" else set())


def test_the_hottest_blocks_are_the_shared_ones_then_those_used_last_each_before_what_continues_it() -> None:
    bench = Bench()
    for number in (1, 2, 3):
        bench.admit(str(number), [number] * 9)
        bench.finish()
    cache, device = bench.workload.tables.cache, bench.workload.tables.device

    def prompt(number: int) -> list[BlockHash]:
        return block_hashes(bench.new("x", [number] * 9).root, [number] * 8, 4)

    hashes = cache.hottest(device.refs, 100)
    assert len(hashes) == len(cache)
    latest = [*prompt(3), *prompt(2), *prompt(1)]
    assert [each for each in hashes if each in latest] == latest
    bench.admit("shares", [1] * 9)
    bench.admit("shares too", [1] * 9)
    bench.step()
    bench.step()
    assert cache.hottest(device.refs, 2) == prompt(1)
