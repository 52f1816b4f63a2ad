"""Bad input at the live service: the right error, the field's name, and no trace anywhere."""

import grpc
import pytest

from octavo.request import errors
from octavo.v1 import inference_pb2
from octavo.wire import statuses

NAN, U32 = float("nan"), 2**32 - 1
CONTEXT, VOCAB = 8192, 1000
# One of each kind: tests/router/streaming/test_request_preparer.py and tests/octavo/request have the others.
BAD = [
    ("token_ids", {"token_ids": {"ids": [1] * 10 * CONTEXT}}),
    ("token_ids", {"token_ids": {"ids": [1, VOCAB]}}),
    ("raw_text", {"raw_text": b"ab\xff"}),
    ("text", {"text": "x" * (16 * CONTEXT + 1)}),
    ("chat.messages[1].role", {"chat": {"messages": [{"role": "user", "content": "x"}, {"content": "x"}]}}),
    ("chat", {"chat": {"messages": [{"role": "user", "content": "x"}]}}),  # this model has no template
    ("request_id", {"text": "x", "request_id": "a\n"}),
    ("priority", {"text": "x", "priority": 99}),
    *(
        (f"sampling.{name}", {"text": "x", "sampling": sampling})
        for name, sampling in (
            ("temperature", {"temperature": NAN}),
            ("n", {"n": U32}),
            ("stop", {"stop": ["x" * 257]}),
            ("allowed_token_ids", {"allowed_token_ids": [U32]}),
            ("banned_token_ids", {"banned_token_ids": list(range(VOCAB))}),
            ("logit_bias", {"logit_bias": {1: NAN}}),
            ("best_of", {"n": 3, "best_of": 2}),
            ("min_tokens", {"max_tokens": 5, "min_tokens": 6}),
        )
    ),
]


def refused(call):
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return statuses.error_from(raised.value)


def test_a_bad_field_is_named_and_leaves_nothing(cluster):
    """The workers run no step more, hold no sequence, and the store has no record or journal more."""

    def traces():
        loads = [cluster.load(name) for name in cluster.worker_endpoints]
        sequences = cluster.store.ask("KEYS", "octavo:seq:*").count(b"octavo:seq:")
        return [(each.num_steps, each.num_sequences, each.num_used_blocks) for each in loads], sequences

    stub, before = cluster.inference(), traces()
    for field, fields in BAD:
        bad = inference_pb2.GenerateRequest(**fields)
        for call in (lambda bad=bad: stub.Complete(bad), lambda bad=bad: list(stub.Generate(bad))):
            error = refused(call)
            assert isinstance(error, errors.InvalidArgument), (field, error)
            assert error.metadata == {"field": field}, (field, error)
            assert error.message.startswith(field) and len(error.message) < 300
    assert traces() == before


def test_what_is_no_stream_is_refused(cluster):
    """A name that is taken, by whichever router; and what nobody can attach to."""
    asked = {"request_id": "mine", "raw_text": b"abc", "sampling": {"temperature": 0, "max_tokens": 3}}
    list(cluster.inference().Generate(inference_pb2.GenerateRequest(**asked)))
    other = inference_pb2.GenerateRequest(**{**asked, "raw_text": b"abd"})
    assert isinstance(refused(lambda: list(cluster.inference(1).Generate(other))), errors.RequestExists)
    for error, field, fields in (
        (errors.NotFound, "", {"request_id": "nobody"}),
        (errors.HistoryLost, "", {"request_id": "mine", "next_indexes": [4]}),
        (errors.InvalidArgument, "next_indexes", {"request_id": "mine", "next_indexes": [0, 0]}),
        (errors.InvalidArgument, "at", {}),
        (errors.InvalidArgument, "request_id", {"request_id": "\n"}),
        (errors.InvalidArgument, "resume_token", {"resume_token": b"x"}),
    ):
        asked = inference_pb2.AttachRequest(**fields)
        found = refused(lambda asked=asked: list(cluster.inference(1).Attach(asked)))
        assert (type(found), found.metadata.get("field", "")) == (error, field), found
