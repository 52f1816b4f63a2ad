"""Bad input at the live service: the right code, the field's name, and no trace anywhere."""

import math
import time

import grpc
import pytest

from octavo.request import errors
from octavo.v1 import inference_pb2
from octavo.wire import statuses

NAN, U32 = math.nan, 2**32 - 1
CONTEXT, VOCAB = 8192, 1000
TEXT = {"text": b"hello"}


def request(sampling=(), **fields):
    message = inference_pb2.GenerateRequest()
    for name, value in (fields or TEXT).items():
        if name == "token_ids":
            message.token_ids.SetInParent()
            message.token_ids.ids.extend(value)
        elif name == "chat":
            message.chat.SetInParent()
            for role, content in value:
                turn = message.chat.messages.add(role=role)
                setattr(turn, "raw_content" if isinstance(content, bytes) else "content", content)
        else:
            setattr(message, name, value)
    for name, value in dict(sampling).items():
        field = getattr(message.sampling, name)
        if isinstance(value, dict):
            for key, item in value.items():
                field[key] = item
        elif isinstance(value, list):
            field.extend(value)
        else:
            setattr(message.sampling, name, value)
    return message


def prompts():
    """One of each kind: tests/router/streaming/test_request_preparer.py has the others."""
    yield "token_ids", request(token_ids=[1] * 10 * CONTEXT)
    yield "token_ids", request(token_ids=[1, VOCAB])
    yield "raw_text", request(raw_text=b"ab\xff")
    yield "text", request(text="x" * (16 * CONTEXT + 1))
    yield "chat.messages[1].role", request(chat=[("user", b"x"), ("", b"x")])
    yield "chat", request(chat=[("user", b"x")])  # this model has no template
    yield "request_id", request(text="x", request_id="a\n")
    yield "priority", request(text="x", priority=99)


# One of each kind: tests/octavo/request has the others.
SAMPLING = [
    ("temperature", {"temperature": NAN}),
    ("n", {"n": U32}),
    ("stop", {"stop": ["x" * 257]}),
    ("allowed_token_ids", {"allowed_token_ids": [U32]}),
    ("banned_token_ids", {"banned_token_ids": list(range(VOCAB))}),
    ("logit_bias", {"logit_bias": {1: NAN}}),
    ("best_of", {"n": 3, "best_of": 2}),
    ("min_tokens", {"max_tokens": 5, "min_tokens": 6}),
]
CASES = [*((f"sampling.{name}", request(sampling)) for name, sampling in SAMPLING), *prompts()]


@pytest.fixture
def untouched(cluster):
    """Afterwards the workers have run no step more, hold no sequence, and the store no key more."""

    def now():
        loads = [cluster.load(name) for name in cluster.worker_endpoints]
        return [(load.num_steps, load.num_sequences, load.num_used_blocks) for load in loads], cluster.store.num_keys()

    before = now()
    yield
    assert now() == before


@pytest.mark.usefixtures("untouched")
def test_a_bad_field_is_named_at_once_and_leaves_nothing(cluster):
    stub, times = cluster.inference(), []
    for field, bad in CASES:
        for call in (
            lambda bad=bad: stub.Complete(bad),
            lambda bad=bad: list(stub.Generate(bad)),
        ):
            began = time.perf_counter()
            with pytest.raises(grpc.RpcError) as raised:
                call()
            times.append(time.perf_counter() - began)
            error = statuses.error_from(raised.value)
            assert isinstance(error, errors.InvalidArgument), (field, error)
            assert error.metadata == {"field": field}, (field, error)
            assert error.message.startswith(field)
            assert len(error.message) < 300
    times.sort()
    print(f"{len(times)} refusals: median {times[len(times) // 2] * 1e3:.1f} ms, worst {times[-1] * 1e3:.1f} ms")
    assert times[len(times) // 2] < 1.0  # 2 ms on a quiet machine
