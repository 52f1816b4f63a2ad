"""Vectors and logits compared: against plain definitions, and at the edges."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.pooling import judges
from octavo.pooling.vectors import cosine, cosines, likelihood
from octavo.request.errors import InvalidArgument
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer

numbers = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20)


@given(numbers, st.data())
def test_a_cosine_does_not_depend_on_order_or_length(left, data):
    right = data.draw(st.lists(st.floats(-100, 100, width=32), min_size=len(left), max_size=len(left)))
    score = cosine(left, right)
    assert -1 <= score <= 1 and cosine(right, left) == score
    order = data.draw(st.permutations(range(len(left))))
    assert cosine([left[i] for i in order], [right[i] for i in order]) == score
    assert cosine([4 * each for each in left], right) == pytest.approx(score, abs=1e-9)
    assert cosines([left, right], [(0, 1), (1, 0)]) == [score, score]
    assert cosine([0.0, 0.0], [1.0, 2.0]) == 0.0
    assert cosine([3.0], [5.0]) == 1.0 and cosine([3.0], [-5.0]) == -1.0


@given(st.floats(-50, 50), st.floats(-50, 50))
def test_a_likelihood_is_the_softmax_of_two_logits(yes, no):
    whole = math.exp(yes) + math.exp(no)
    assert likelihood(yes, no) == pytest.approx(math.exp(yes) / whole)
    assert likelihood(-3e38, 3e38) == 0.0 and likelihood(3e38, -3e38) == 1.0


def test_a_judge_needs_a_token_for_each_word():
    assert judges.chosen_method("", "") == "cosine" and judges.chosen_method("", "qwen3") == "qwen3"
    assert judges.chosen_method("cosine", "qwen3") == "cosine"
    for asked in ("dot", "x" * 1000):
        with pytest.raises(InvalidArgument, match="method"):
            judges.chosen_method(asked, "")
    with pytest.raises(InvalidArgument, match="yes"):
        judges.words("qwen3", ByteTokenizer())
    prompt = bytes(judges.judge_prompt("qwen3", ByteTokenizer(), "q", "d", "look")).decode()
    assert prompt.endswith("<Instruct>: look\n<Query>: q\n<Document>: d" + judges.JUDGES["qwen3"].after)
