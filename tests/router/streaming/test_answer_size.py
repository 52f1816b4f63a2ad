import pytest

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams, TokenScore
from octavo.wire.public import score_to_wire
from router.streaming.answer_size import SCORE_BYTES, check_answer_fits


@pytest.mark.parametrize(
    ("params", "prompt_len", "field"),
    [
        (SamplingParams(n=16, max_tokens=131_072), 5, "sampling.max_tokens"),
        (SamplingParams(max_tokens=32_768, logprobs=20), 5, "sampling.logprobs"),
        (SamplingParams(max_tokens=1, prompt_logprobs=20), 32_768, "sampling.prompt_logprobs"),
    ],
)
def test_an_answer_that_no_message_holds_is_refused_with_the_way_round_it(params, prompt_len, field):
    with pytest.raises(InvalidArgument, match="call Generate") as raised:
        check_answer_fits(params, prompt_len)
    assert raised.value.field == field


def test_the_refusal_names_the_size_above_which_it_comes():
    with pytest.raises(InvalidArgument, match=r"may have 3\.8 MiB, and Complete answers with at most 3\.5;"):
        check_answer_fits(SamplingParams(max_tokens=500_000), 1)


def test_usual_answers_fit():
    check_answer_fits(SamplingParams(max_tokens=131_072), 131_072)
    check_answer_fits(SamplingParams(max_tokens=4096, logprobs=20), 10)


def test_the_size_of_a_score_is_that_of_its_message():
    score = TokenScore(150_000, -12.5, tuple((150_000 - i, -13.5) for i in range(20)))
    assert score_to_wire(score).ByteSize() <= SCORE_BYTES * 21 + 8
