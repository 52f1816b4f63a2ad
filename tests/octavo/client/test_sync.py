import pytest
from scripted_router import served

from octavo.client import Client, FinishReason, RetryPolicy
from octavo.v1 import inference_pb2_grpc

QUICK = RetryPolicy(progress_timeout_s=5.0, backoff_base_s=0.001, backoff_cap_s=0.01)


@pytest.fixture
def endpoint(router):
    """A router on an event loop in another thread, as for any program without asyncio."""
    with served((inference_pb2_grpc.add_InferenceServicer_to_server, router)) as endpoint:
        yield endpoint


def test_a_stream_is_an_iterator_that_survives_breaks(router, endpoint, script):
    router.scripts.extend([script(at=3, fault="UNAVAILABLE"), script(at=2, fault="twice")])
    with Client(endpoint, policy=QUICK) as client:
        stream = client.generate("hello", max_tokens=24)
        events = list(stream)
        assert list(stream) == []
    assert [token for event in events for token in event.token_ids] == router.oracle[0]
    assert "".join(event.text for event in events) == router.oracle[1]
    assert stream.num_reattaches == 1
    assert stream.request_id == router.calls[0][1].request_id


def test_everything_else_blocks_too(router, endpoint):
    with Client(endpoint) as client:
        completion = client.complete("hello", temperature=0.0)
        assert (list(completion.token_ids), completion.text) == router.oracle
        assert completion.finish_reason is FinishReason.LENGTH
        assert client.tokenize("a") == [97]
        assert client.detokenize([97]) == "a"
        assert client.get("r").request_id == "r"
        assert [model.name for model in client.models()] == ["m"]
        client.cancel("r")
        assert next(client.attach(completion.request_id)).first_index == 0
    assert router.cancelled == ["r"]


def test_closing_a_stream_early_leaves_the_client_usable(router, endpoint, script):
    router.scripts.append(script(at=1, fault="hang"))
    with Client(endpoint) as client:
        with client.generate("hello") as stream:
            next(stream)
        assert client.complete("hello").text == router.oracle[1]
    client.close()
