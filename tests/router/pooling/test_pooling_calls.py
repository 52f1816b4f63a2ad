"""What a call costs before a worker hears of it: a bound on its tokens, and no long sums on the event loop."""

import asyncio
import threading
from array import array
from types import SimpleNamespace

import pytest

from octavo.pooling import vectors
from octavo.pooling.params import MAX_CALL_TOKENS, MAX_INPUTS, ModelPooling, PoolingParams
from octavo.request.errors import Draining, InvalidArgument
from octavo.request.limits import NO_QUOTA
from octavo.request.validation import validate_text
from octavo.store.calls import QueueLimits
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from octavo.wire.pooling import PromptVector, floats_to_bytes
from router.pooling import pooling_calls
from router.pooling.pooling_calls import AskedScores, PoolingCalls
from router.pooling.pooling_gate import PoolingGate

LONG = "x" * 4096
PAIR = AskedScores(left=["a"], right=["b"])
TEXTS = [f"{i:04}{LONG}" for i in range(MAX_INPUTS)]


class CountingTokenizer(ByteTokenizer):
    """It counts the tokens that it makes. Octavo's own words are one token each."""

    num_tokens = 0

    def encode(self, text):
        self.num_tokens += len(text)
        return super().encode(text)

    def encode_frame(self, text):
        return [1]


class Vectors:
    """Answers each prompt with a vector of its first two tokens."""

    async def vectors(self, call, prompts):
        return [PromptVector(i, floats_to_bytes(array("f", prompt[:2]))) for i, prompt in enumerate(prompts)]


@pytest.fixture
def model():
    pooling = ModelPooling(hidden_size=2)
    sizes = {"context_tokens": 8192, "vocab_size": 256}
    return SimpleNamespace(name="m", tokenizer=CountingTokenizer(), pooling=pooling, **sizes)


@pytest.fixture
def calls():
    authorizer = SimpleNamespace(current_tenant=lambda: "t", current_quota=lambda quota: NO_QUOTA)
    return PoolingCalls(None, Vectors(), PoolingGate(QueueLimits()), authorizer)


async def test_no_more_is_tokenized_than_a_call_may_have(calls, model):
    judged = AskedScores(left=[LONG], right=["d"] * MAX_INPUTS, method="qwen3", right_field="field")
    compared = AskedScores(left=["q"], right=TEXTS, right_field="field")
    for ask in (
        lambda: calls.score(model, judged, None),
        lambda: calls.score(model, compared, None),
        lambda: calls.embed(model, TEXTS, PoolingParams(), None, "field"),
    ):
        model.tokenizer.num_tokens = 0
        with pytest.raises(InvalidArgument, match="tokens together") as raised:
            await ask()
        assert raised.value.field == "field"
        assert model.tokenizer.num_tokens < MAX_CALL_TOKENS + 2 * len(LONG)


async def test_a_text_that_is_in_many_pairs_is_checked_once(calls, model, monkeypatch):
    checked = []

    def check(text, field, **named):
        checked.append(field)
        return validate_text(text, field, **named)

    monkeypatch.setattr(pooling_calls.validation, "validate_text", check)
    await calls.score(model, AskedScores(left=["query"], right=["a1", "b2", "c3"], method="qwen3"), None)
    assert checked == ["left", "right[0]", "right[1]", "right[2]"]


async def test_cosines_do_not_stop_the_event_loop(calls, model, monkeypatch):
    threads, cosines = [], vectors.cosines
    monkeypatch.setattr(
        vectors, "cosines", lambda *each: (threads.append(threading.current_thread()), cosines(*each))[1]
    )
    answer = await calls.score(model, AskedScores(left=["ab"], right=["ba", "ab", "ba"]), None)
    assert answer.scores == [vectors.cosine(b"ab", b"ba"), 1.0, vectors.cosine(b"ab", b"ba")]
    assert threads[0] is not threading.current_thread()


async def test_what_is_refused_is_counted_once_by_its_reason_and_tenant(calls, model):
    """Also what comes while a router leaves, which waits for the calls that it has."""
    refused = []
    calls._on_refusal = lambda error, tenant: refused.append((error.reason, tenant))
    for left, right, method in ((["a"], [], ""), (["a"], ["b"] * 3, "none"), (["a", "b"], ["c"], "qwen3")):
        with pytest.raises(InvalidArgument):
            await calls.score(model, AskedScores(left=left, right=right, method=method), None)
    for inputs in ([], [[999]], TEXTS):
        with pytest.raises(InvalidArgument):
            await calls.embed(model, inputs, PoolingParams(), None)
    waiting = asyncio.create_task(calls.gate.wait_until_empty())
    with calls.gate.admit("t", NO_QUOTA, 1, 10):
        calls.gate.refuse_calls()
        for ask in (lambda: calls.embed(model, ["a"], PoolingParams(), None), lambda: calls.score(model, PAIR, None)):
            with pytest.raises(Draining):
                await ask()
        assert refused == [("INVALID_ARGUMENT", "t")] * 6 + [("DRAINING", "t")] * 2
        assert not waiting.done()
    await waiting
