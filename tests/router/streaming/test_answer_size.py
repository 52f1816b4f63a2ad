import pytest

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams
from router.streaming.request_preparer import check_answer_fits


@pytest.mark.parametrize(
    ("params", "prompt_len", "field"),
    [
        (SamplingParams(n=16, max_tokens=131_072), 5, "sampling.max_tokens"),
        (SamplingParams(max_tokens=32_768, logprobs=20), 5, "sampling.logprobs"),
        (SamplingParams(max_tokens=1, prompt_logprobs=20), 32_768, "sampling.prompt_logprobs"),
    ],
)
def test_too_large_answers_are_refused_with_a_remedy(params, prompt_len, field):
    with pytest.raises(InvalidArgument, match="call Generate") as raised:
        check_answer_fits(params, prompt_len)
    assert raised.value.field == field
