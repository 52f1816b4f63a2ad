"""What a call costs before a worker hears of it: a bound on its tokens, and no long sums on the event loop."""

import asyncio
import threading
from array import array
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

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

    def encode(self, text: str) -> list[int]:
        self.num_tokens += len(text)
        return super().encode(text)

    def encode_frame(self, text: str) -> list[int]:
        return [1]


class Vectors:
    """Answers each prompt with a vector of its first two tokens."""

    async def vectors(self, call: object, prompts: Sequence[list[int]]) -> list[PromptVector]:
        return [PromptVector(i, floats_to_bytes(array("f", prompt[:2]))) for i, prompt in enumerate(prompts)]


@pytest.fixture
def model() -> Any:
    pooling = ModelPooling(hidden_size=2)
    return SimpleNamespace(
        name="m", tokenizer=CountingTokenizer(), pooling=pooling, context_tokens=8192, vocab_size=256
    )


@pytest.fixture
def calls() -> PoolingCalls:
    authorizer: Any = SimpleNamespace(current_tenant=lambda: "t", current_quota=lambda quota: NO_QUOTA)
    nobody: Any = None
    dispatcher: Any = Vectors()
    return PoolingCalls(nobody, dispatcher, PoolingGate(QueueLimits()), authorizer)


def judged(calls: PoolingCalls, model: Any) -> Awaitable[object]:
    asked = AskedScores(left=[LONG], right=["d"] * MAX_INPUTS, method="qwen3", right_field="field")
    return calls.score(model, asked, None)


def compared(calls: PoolingCalls, model: Any) -> Awaitable[object]:
    return calls.score(model, AskedScores(left=["q"], right=TEXTS, right_field="field"), None)


def embedded(calls: PoolingCalls, model: Any) -> Awaitable[object]:
    return calls.embed(model, TEXTS, PoolingParams(), None, "field")


@pytest.mark.parametrize("call", [judged, compared, embedded])
async def test_no_more_is_tokenized_than_a_call_may_have(
    calls: PoolingCalls, model: Any, call: Callable[[PoolingCalls, Any], Awaitable[object]]
) -> None:
    with pytest.raises(InvalidArgument, match="tokens together") as raised:
        await call(calls, model)
    assert raised.value.field == "field"
    assert model.tokenizer.num_tokens < MAX_CALL_TOKENS + 2 * len(LONG)


async def test_a_text_that_is_in_many_pairs_is_checked_once(
    calls: PoolingCalls, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = list[str]()

    def check(text: str, field: str, **named: Any) -> str:
        checked.append(field)
        return validate_text(text, field, **named)

    monkeypatch.setattr(pooling_calls.validation, "validate_text", check)
    await calls.score(model, AskedScores(left=["query"], right=["a1", "b2", "c3"], method="qwen3"), None)
    assert checked == ["left", "right[0]", "right[1]", "right[2]"]


async def test_cosines_do_not_stop_the_event_loop(
    calls: PoolingCalls, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, cosines = [], vectors.cosines

    def noting(*arguments: Any) -> list[float]:
        threads.append(threading.current_thread())
        return cosines(*arguments)

    monkeypatch.setattr(vectors, "cosines", noting)
    answer = await calls.score(model, AskedScores(left=["ab"], right=["ba", "ab", "ba"]), None)
    assert answer.scores == [vectors.cosine(b"ab", b"ba"), 1.0, vectors.cosine(b"ab", b"ba")]
    assert threads[0] is not threading.current_thread()


async def test_what_is_refused_is_counted_once_by_its_reason_and_tenant(calls: PoolingCalls, model: Any) -> None:
    refused = list[tuple[str, str]]()
    calls._on_refusal = lambda error, tenant: refused.append((error.reason, tenant))
    for left, right, method in ((["a"], [], ""), (["a"], ["b"] * 3, "none"), (["a", "b"], ["c"], "qwen3")):
        with pytest.raises(InvalidArgument):
            await calls.score(model, AskedScores(left=left, right=right, method=method), None)
    for inputs in ([], [[999]], TEXTS):
        with pytest.raises(InvalidArgument):
            await calls.embed(model, inputs, PoolingParams(), None)
    calls.gate.refuse_calls()
    for ask in (lambda: calls.embed(model, ["a"], PoolingParams(), None), lambda: calls.score(model, PAIR, None)):
        with pytest.raises(Draining):
            await ask()
    assert refused == [("INVALID_ARGUMENT", "t")] * 6 + [("DRAINING", "t")] * 2


async def test_a_gate_is_empty_when_its_last_call_has_ended() -> None:
    gate = PoolingGate(QueueLimits())
    waiting = asyncio.create_task(gate.wait_until_empty())
    with gate.admit("t", NO_QUOTA, 1, 10):
        gate.refuse_calls()
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting
