"""Log probabilities of a prompt, in vLLM's shape."""

import math

from octavo.request.sampling import TokenScore
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from octavo.wire.public import score_to_wire
from router.http.prompts.prompt_scores import shown_prompt_scores


def test_ranks_are_those_of_the_likeliest_tokens():
    likely = TokenScore(ord("a"), -0.5, ((ord("a"), -0.5), (ord("b"), -1.0)))
    rare = TokenScore(200, -math.inf, ((ord("a"), -0.5),))
    first, second, third = shown_prompt_scores(ByteTokenizer(), [score_to_wire(each) for each in (likely, rare)])
    assert first is None
    assert second == {
        "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
    }
    assert third == {
        "200": {"logprob": -9999.0, "rank": None, "decoded_token": "\ufffd"},
        "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
    }
