"""Prompts of models with an encoder: what a router makes is what a worker takes, and nothing else."""

import pytest

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams
from octavo.text.encoded_prompt import NO_ENCODER, EncoderSupport

BART = EncoderSupport(start=(2, 0), max_encoded=5, max_output=8)
PARAMS = SamplingParams(max_tokens=8)


def test_what_is_made_is_taken():
    prompt = BART.prompt_of([7, 8, 9], "token_ids")
    assert prompt == [7, 8, 9, 2, 0] and BART.num_encoded(len(prompt)) == BART.num_given(len(prompt)) == 3
    BART.check_sequence(prompt, BART.salt_of("tenant", prompt), PARAMS)
    assert BART.context_for(len(prompt), 100) == 13 and BART.context_for(len(prompt), 9) == 9
    # Salts tell tenants and whole prompts apart, also one that begins with the other.
    salts = {BART.salt_of(tenant, ids) for tenant in ("", "a" * 128) for ids in (prompt, [7, 8, 2, 0], [7, 2, 0])}
    assert len(salts) == 6 and {len(salt) for salt in salts} == {64}


def test_a_model_without_an_encoder_changes_nothing():
    assert NO_ENCODER.prompt_of([7, 8], "x") == [7, 8] and NO_ENCODER.salt_of("tenant", [7]) == "tenant"
    assert NO_ENCODER.num_given(2) == 2 and NO_ENCODER.num_encoded(2) == 0 and NO_ENCODER.context_for(2, 9) == 9
    NO_ENCODER.check_sequence([7], "", SamplingParams(prompt_logprobs=1))


@pytest.mark.parametrize(
    ("prompt", "salted", "params", "field"),
    [
        ([7, 8, 9], [7, 8, 9], PARAMS, "prompt"),  # of a router that knows of no encoder
        ([2, 0], [2, 0], PARAMS, "prompt"),
        ([7] * 6 + [2, 0], [7] * 6 + [2, 0], PARAMS, "prompt"),
        ([7, 8, 2, 0], [7, 9, 2, 0], PARAMS, "salt"),
        ([7, 2, 0], [7, 2, 0], SamplingParams(max_tokens=9), "sampling.max_tokens"),
        ([7, 2, 0], [7, 2, 0], SamplingParams(max_tokens=8, prompt_logprobs=0), "prompt_logprobs"),
    ],
)
def test_a_worker_refuses_what_would_be_wrong(prompt, salted, params, field):
    with pytest.raises(InvalidArgument) as refused:
        BART.check_sequence(prompt, BART.salt_of("t", salted), params)
    assert refused.value.field == field


@pytest.mark.parametrize(("tokens", "what"), [([], "is empty"), ([7] * 6, "6 tokens; .* at most 5: shorten it")])
def test_a_prompt_that_the_encoder_does_not_read_is_refused(tokens, what):
    with pytest.raises(InvalidArgument, match=f"^text: .*{what}"):
        BART.prompt_of(tokens, "text")
