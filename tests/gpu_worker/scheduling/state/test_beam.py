"""Beam search as pure rules."""

from hypothesis import given
from hypothesis import strategies as st
from scheduler_bench import Bench

from gpu_worker.scheduling.state.beam import BeamSearch, Hypothesis
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.store.calls import PROOF_TOKENS


def search(**rules) -> BeamSearch:
    usual = {"width": 2, "num_best": 2, "length_penalty": 1.0, "max_tokens": 5, "min_tokens": 0}
    return BeamSearch(**{**usual, "stops": frozenset({9}), **rules})


@given(
    complete=st.lists(st.tuples(st.floats(-20, 0), st.integers(1, 5)), max_size=4),
    live=st.lists(st.floats(-20, 0), min_size=1, max_size=3),
    penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    losses=st.lists(st.floats(0, 3), min_size=0, max_size=3),
)
def test_a_decided_search_cannot_change(complete, live, penalty, losses):
    rules = search(length_penalty=penalty, max_tokens=8)
    for total, length in complete:
        rules.keep(Hypothesis((1,) * length, total, rules.normalize(total, length), FinishReason.STOP))
    length = 4
    if not rules.decided(live, length):
        return
    best = [hypothesis.score for hypothesis in rules.complete]
    for total in live:
        for more in range(1, 8 - length + 1):  # whatever it gets to be, at whatever length it ends
            score = rules.normalize(total - sum(losses[:more]), length + more)
            assert len(best) == rules.num_best and score <= best[-1]


def test_a_search_tells_how_far_it_is() -> None:
    bench = Bench()
    bench.admit("beams", [1, 2, 3], SamplingParams(beam_width=2, max_tokens=40, seed=1))
    told = [each.num_tokens for _ in range(60) for each in bench.step()[1].progress]
    assert told == [PROOF_TOKENS, 2 * PROOF_TOKENS]  # the end is in the items
