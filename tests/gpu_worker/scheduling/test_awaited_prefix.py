"""A sequence that waits for blocks of another worker keeps nobody back, and starts when the wait is over."""

from dataclasses import replace

from migration_benches import MigrationBench
from scheduler_bench import GREEDY

from octavo.request.sampling import FinishReason

LONG = replace(GREEDY, max_tokens=30)


def admit_waiting(bench: MigrationBench, name: str, prompt: int = 9) -> None:
    bench.admit(name, prompt, LONG)
    bench.sequence(name).awaits_prefix = True


def test_it_does_not_start_and_others_overtake_it() -> None:
    bench = MigrationBench()
    admit_waiting(bench, "a")
    assert not bench.scheduler.has_work, "a step would bring nothing"
    bench.admit("b", 9, LONG)
    bench.run_steps(3)
    assert bench.tokens["b.0"] and "a.0" not in bench.tokens
    bench.scheduler.end_wait(bench.sequence("a"))
    bench.scheduler.end_wait(bench.sequence("a"))
    bench.finish()
    assert len(bench.tokens["a.0"]) == len(bench.tokens["b.0"]) == 30


def test_nobody_gives_up_blocks_for_it() -> None:
    bench = MigrationBench(sizes={"num_blocks": 12})
    admit_waiting(bench, "a", 16)
    bench.admit("b", 16, LONG)
    bench.finish()
    assert len(bench.tokens["b.0"]) == 30
    assert not bench.load().num_preempted_recompute


def test_it_ends_by_a_cancel_and_by_its_drop() -> None:
    bench = MigrationBench()
    for name in ("a", "b"):
        admit_waiting(bench, name)
    bench.cancel("a")
    bench.drop("b")
    bench.step()
    assert bench.finishes == {"a.0": FinishReason.CANCELLED}
    assert not bench.workload.sequences
    bench.scheduler.check_state()
