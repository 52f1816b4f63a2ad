"""protos/service_config.json does to gRPC what protos/CLIENTS.md says: no library complains about a wrong one."""

import json
from pathlib import Path

import grpc
import pytest
from refusing_router import refusing

from octavo.v1 import inference_pb2, inference_pb2_grpc

TEXT = (Path(__file__).resolve().parents[2] / "protos/service_config.json").read_text(encoding="utf-8")
CONFIG = json.loads(TEXT)
REQUESTS = {
    "Generate": inference_pb2.GenerateRequest(text="Hello"),
    "Complete": inference_pb2.GenerateRequest(text="Hello"),
    "Attach": inference_pb2.AttachRequest(request_id="a"),
    "Cancel": inference_pb2.CancelRequest(request_id="a"),
    "Get": inference_pb2.GetRequest(request_id="a"),
    "Tokenize": inference_pb2.TokenizeRequest(text="Hello"),
    "Detokenize": inference_pb2.DetokenizeRequest(token_ids=[1]),
    "ListModels": inference_pb2.ListModelsRequest(),
    "Embed": inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="Hello")]),
    "Score": inference_pb2.ScoreRequest(left=["Hello"], right=["Hi"]),
}
# A connection that breaks may have brought the request to a router: repeated without a request_id, it would run twice.
RUNS_TWICE = {"Generate", "Complete"}
UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


def call(endpoint, method):
    """The code of one call over a channel that has nothing but the service config."""
    with grpc.insecure_channel(endpoint, options=[("grpc.service_config", TEXT)]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            reply = getattr(stub, method)(REQUESTS[method], timeout=20)
            if method in ("Generate", "Attach"):
                list(reply)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_every_method_is_there():
    service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    named = [name["method"] for method in CONFIG["methodConfig"] for name in method["name"]]
    assert sorted(named) == sorted(method.name for method in service.methods) == sorted(REQUESTS)
    assert {name["service"] for method in CONFIG["methodConfig"] for name in method["name"]} == {service.full_name}
    assert not any("timeout" in method for method in CONFIG["methodConfig"])


@pytest.mark.parametrize("method", REQUESTS)
def test_what_a_router_refuses_is_tried_again(method):
    with refusing(2, EXHAUSTED) as (router, endpoint):
        assert call(endpoint, method) is grpc.StatusCode.OK
    assert router.attempts == [0, 1, 2]


@pytest.mark.parametrize("method", REQUESTS)
def test_what_may_run_already_is_not_repeated(method):
    with refusing(1, UNAVAILABLE) as (router, endpoint):
        code = call(endpoint, method)
    assert (code, router.attempts) == ((UNAVAILABLE, [0]) if method in RUNS_TWICE else (grpc.StatusCode.OK, [0, 1]))


def test_a_router_says_never():
    with refusing(1, EXHAUSTED, pushback_ms=-1) as (router, endpoint):
        assert call(endpoint, "Complete") is EXHAUSTED
    assert router.attempts == [0]
