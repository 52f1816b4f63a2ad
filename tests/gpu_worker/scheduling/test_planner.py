"""What a step holds: budgets of tokens and prompts, decodes first, who runs alone."""

from dataclasses import replace

from scheduler_bench import GREEDY, Bench

from octavo.sampling import FinishReason


def test_a_long_prompt_starves_nobody_and_is_not_starved() -> None:
    bench = Bench(runner={"num_blocks": 600, "context_tokens": 4096}, max_batch_tokens=32)
    bench.admit("long", 1600)
    first_tokens: dict[str, int] = {}
    for step in range(400):
        if step % 3 == 0 and step < 60:
            bench.admit(f"short{step}", 10, replace(GREEDY, max_tokens=3))
        plan, result = bench.step()
        assert plan.num_tokens <= 32
        if "long.0" not in bench.tokens and "long" not in bench.lengths:
            raise AssertionError("the long prompt stood still")
        for delta in result.deltas:
            first_tokens.setdefault(delta.sequence.seq_id, step)
        if not bench.scheduler.has_work:
            break
    for name, step in first_tokens.items():
        if name.startswith("short"):
            assert step - int(name.removeprefix("short")) <= 3
    assert first_tokens["long"] <= 1600 / (32 / 4) + 1


def test_only_so_many_prompts_are_under_way() -> None:
    bench = Bench(runner={"num_blocks": 200}, max_partial_prefills=3, max_long_partial_prefills=2)
    for number in range(6):
        bench.admit(f"s{number}", 100)
    seen, most = set(), 0
    for _ in range(25):
        plan = bench.scheduler.plan()
        seen |= {chunk.branch.sequence.seq_id for chunk in plan.chunks}
        bench.scheduler.commit(plan, bench.runner.run(plan))
        left = [len(branch.tokens) - branch.num_computed for branch in bench.workload.lists.prefilling]
        assert len(left) <= 3
        assert sum(num_tokens > 32 for num_tokens in left) <= 2
        most = max(most, len(left))
    assert most >= 2 and len(seen) == 6


def test_decodes_come_first_and_prompts_get_what_is_left() -> None:
    bench = Bench(max_batch_tokens=16)
    for name in "abc":
        bench.admit(name, 4, replace(GREEDY, max_tokens=50))
    bench.step()
    bench.admit("p", 40)
    plan, _ = bench.step()
    assert [chunk.length for chunk in plan.chunks] == [1, 1, 1, 13]
    assert plan.num_decodes == 3


def test_unchunked_prompts_run_whole_and_never_beside_decodes() -> None:
    bench = Bench(chunked_prefill=False, max_batch_tokens=24)
    sizes = {"a": 20, "b": 8, "c": 12, "d": 23}
    for name, size in sizes.items():
        bench.admit(name, size, replace(GREEDY, max_tokens=4))
    prefilled = {}
    while bench.scheduler.has_work:
        plan, _ = bench.step()
        fresh = {
            chunk.branch.sequence.seq_id: chunk.length
            for chunk in plan.chunks
            if chunk not in plan.chunks[: plan.num_decodes]
        }
        assert not (fresh and plan.num_decodes)
        prefilled.update(fresh)
    assert prefilled == sizes
    bench.admit("e", 60)  # longer than a step: it has to be split even so
    bench.finish()
    assert len(bench.tokens["e.0"]) == 8


def test_who_must_run_alone_does() -> None:
    bench = Bench()
    for name in "abc":
        bench.admit(name)
    bench.admit("x", alone=True)
    bench.admit("y", alone=True)
    while bench.scheduler.has_work:
        plan, _ = bench.step()
        names = {chunk.branch.sequence.seq_id for chunk in plan.chunks}
        assert len(names) == 1 or not names & {"x", "y"}
    assert set(bench.finishes.values()) == {FinishReason.LENGTH}


def test_the_watermark_is_left_free_by_sequences_that_start_beside_others() -> None:
    def started(watermark: float) -> tuple[set[str], int]:
        bench = Bench(runner={"num_blocks": 20}, watermark=watermark, max_batch_tokens=64)
        for name in ("a", "b", "c"):
            bench.admit(name, 4 * 5 - 1)  # five blocks each, the next token included
        bench.step()
        return set(bench.lengths), bench.load().num_free_blocks

    assert started(0.0) == ({"a", "b", "c"}, 5)
    assert started(0.5) == ({"a", "b"}, 10)
    assert started(0.99) == ({"a"}, 15)
    bench = Bench(runner={"num_blocks": 20}, watermark=0.99, max_batch_tokens=128)
    bench.admit("alone", 4 * 19)
    assert bench.step()[0].num_tokens == 4 * 19, "alone, a sequence may have all blocks"
