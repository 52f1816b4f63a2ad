"""Who is let in: what never fits, a full queue, epochs."""

from scheduler_bench import Bench

from octavo.request.record import AdmissionAnswer, AdmissionOutcome
from octavo.request.sampling import SamplingParams

ADMITTED, LATER, NEVER = AdmissionOutcome.ADMITTED, AdmissionOutcome.LATER, AdmissionOutcome.NEVER
STALE_EPOCH = AdmissionOutcome.STALE_EPOCH


def test_what_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    bench = Bench(runner={"num_blocks": 4, "context_tokens": 100})
    refused = bench.scheduler.admit(bench.new("a", 17))
    assert refused.outcome is NEVER
    assert refused.failure.reason == "TOO_LARGE"
    assert "17 tokens need 5 blocks" in refused.failure.message and "has 4" in refused.failure.message
    assert bench.scheduler.admit(bench.new("b", 100)).outcome is NEVER
    wide = SamplingParams(temperature=0.0, beam_width=5, max_tokens=3)
    assert bench.scheduler.admit(bench.new("c", 2, wide)).outcome is NEVER
    assert bench.scheduler.admit(bench.new("d", 16)).admitted
    assert set(bench.workload.sequences) == {"d"}


def test_epochs_replace_repeat_or_are_stale() -> None:
    bench = Bench()
    bench.admit("a", epoch=2)
    bench.step()
    running = bench.sequence("a")
    assert bench.scheduler.admit(bench.new("a", epoch=2)) == AdmissionAnswer(ADMITTED)
    stale = bench.scheduler.admit(bench.new("a", epoch=1))
    assert (stale.outcome, stale.failure.reason) == (STALE_EPOCH, "STALE_EPOCH")
    assert bench.sequence("a") is running
    newer = bench.admit("a", epoch=3)
    assert bench.sequence("a") is newer
    bench.finish()
    assert bench.load().num_sequences == 0


def test_a_newer_epoch_ends_the_older_one_even_if_it_is_refused_itself() -> None:
    bench = Bench(max_waiting=1, runner={"num_blocks": 4, "context_tokens": 100})
    for size, outcome in ((17, NEVER), (5, LATER)):
        bench.admit("a", 4)
        bench.step()
        bench.admit("waits", 4)
        assert bench.scheduler.admit(bench.new("a", size, epoch=2)).outcome is outcome
        assert set(bench.workload.sequences) == {"waits"}
        bench.finish()
        assert "a.0" not in bench.finishes
        bench.finishes.clear()
