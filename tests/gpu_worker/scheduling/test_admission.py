"""Who is let in: what never fits, a full queue, epochs."""

from dataclasses import replace

import pytest
from scheduler_bench import GREEDY, Bench

from gpu_worker.scheduling.scheduler import Outcome
from octavo.errors import StaleEpoch
from octavo.ids import SequenceId
from octavo.sampling import SamplingParams


def test_what_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    bench = Bench(runner={"num_blocks": 4, "context_tokens": 100})
    refused = bench.scheduler.admit(bench.sequence("a", 17))
    assert refused.outcome is Outcome.NEVER
    assert "17 tokens need 5 blocks" in refused.message and "has 4" in refused.message
    assert bench.scheduler.admit(bench.sequence("b", 100)).never
    wide = SamplingParams(temperature=0.0, beam_width=5, max_tokens=3)
    assert bench.scheduler.admit(bench.sequence("c", 2, wide)).never
    assert bench.scheduler.admit(bench.sequence("d", 16)).ok
    assert not bench.scheduler.cancel(SequenceId("a"))


def test_a_full_queue_answers_later() -> None:
    bench = Bench(max_waiting=2)
    assert [bench.scheduler.admit(bench.sequence(n)).outcome for n in "abc"] == [Outcome.OK, Outcome.OK, Outcome.LATER]
    assert SequenceId("c") not in bench.scheduler.sequences


def test_epochs_replace_repeat_or_are_stale() -> None:
    bench = Bench()
    bench.admit("a", epoch=2)
    bench.step()
    assert bench.scheduler.admit(bench.sequence("a", epoch=2)).ok
    with pytest.raises(StaleEpoch):
        bench.scheduler.admit(bench.sequence("a", epoch=1))
    newer = bench.admit("a", epoch=3)
    assert bench.scheduler.sequences[SequenceId("a")] is newer
    bench.finish()
    assert all(epoch == 3 for epoch in [newer.epoch])
    assert bench.scheduler.load().num_sequences == 0


def test_max_tokens_reserves_nothing() -> None:
    bench = Bench(runner={"num_blocks": 8})
    for name in "abcd":
        bench.admit(name, 5, replace(GREEDY, max_tokens=24))
    plan, _ = bench.step()
    assert len(plan.chunks) == 4
