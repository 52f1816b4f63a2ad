"""Beam search as pure rules."""

from hypothesis import given
from hypothesis import strategies as st
from scheduler_bench import Bench
from sequences import beam_text

from gpu_worker.scheduling.state.beam import BeamSearch, Hypothesis, expand
from octavo.request.sampling import FinishReason, SamplingParams, TokenScore
from octavo.store.calls import PROOF_TOKENS


def search(**rules) -> BeamSearch:
    rules = {
        "width": 2,
        "num_best": 2,
        "length_penalty": 1.0,
        "max_tokens": 5,
        "min_tokens": 0,
        "stops": frozenset({9}),
        **rules,
    }
    return BeamSearch(**rules)


def test_ties_go_to_the_earlier_beam_and_the_lower_token() -> None:
    offer = TokenScore(4, -1.0, ((4, -1.0), (3, -1.0)))
    order = [(c.parent, c.score.token_id) for c in expand([0.0, 0.0], [offer, offer])]
    assert order == [(0, 3), (0, 4), (1, 3), (1, 4)]


def test_an_ending_candidate_counts_only_among_the_best_and_never_takes_a_place() -> None:
    offers = [TokenScore(1, -0.1, ((1, -0.1), (9, -0.2), (2, -0.3), (3, -0.4)))]
    going, ended = search().select(expand([0.0], offers), 1, [None])
    assert [c.score.token_id for c in going] == [1, 2]
    assert [c.score.token_id for c in ended] == [9]
    offers = [TokenScore(1, -0.1, ((1, -0.1), (2, -0.2), (9, -0.3), (3, -0.4)))]
    assert search().select(expand([0.0], offers), 1, [None])[1] == []
    assert [c.score.token_id for c in search(min_tokens=3).select(expand([0.0], offers), 3, [None])[0]] == [1, 2]


def test_a_candidate_that_completes_a_stop_string_ends_where_min_tokens_allow_it() -> None:
    text = beam_text(SamplingParams(beam_width=2, stop=("ab",), min_tokens=2))
    assert text is not None
    text.push(b"a")
    offers = [TokenScore(1, -0.1, tuple((ord(char), -0.1 * place) for place, char in enumerate("bcde", 1)))]
    for _ in range(2):  # selecting changes no text
        going, ended = search().select(expand([0.0], offers), 2, [text])
        assert [c.score.token_id for c in ended] == [ord("b")]
        assert [c.score.token_id for c in going] == [ord("c"), ord("d")]
    late = beam_text(SamplingParams(beam_width=2, stop=("ab",), min_tokens=3))
    assert late is not None
    late.push(b"a")
    assert search().select(expand([0.0], offers), 2, [late]).complete == []


@given(
    complete=st.lists(st.tuples(st.floats(-20, 0), st.integers(1, 5)), max_size=4),
    live=st.lists(st.floats(-20, 0), min_size=1, max_size=3),
    penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    losses=st.lists(st.floats(0, 3), min_size=0, max_size=3),
)
def test_a_decided_search_cannot_change(
    complete: list[tuple[float, int]], live: list[float], penalty: float, losses: list[float]
) -> None:
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
