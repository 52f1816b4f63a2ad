import asyncio
import re
import threading

import pytest

from octavo.client import AsyncClient, Client, FinishReason, RetryPolicy
from octavo.request import errors

QUICK = RetryPolicy(progress_timeout_s=5.0, backoff_base_s=0.001, backoff_cap_s=0.01)


@pytest.fixture
def endpoint(router, serve):
    """A router on an event loop in another thread, as for any program without asyncio."""
    address, stop, started = [], [], threading.Event()

    async def main():
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        async with serve(router) as endpoint:
            address.append(endpoint)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    started.wait(10)
    yield address[0]
    stop[0]()
    thread.join(10)


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


def test_errors_are_typed_and_bad_arguments_never_leave(router, endpoint):
    with Client(endpoint) as client:
        with pytest.raises(errors.InvalidArgument, match="max_tokens"):
            client.generate("hello", max_tokens=-1)
        with pytest.raises(errors.NotFound):
            next(client.attach("unknown"))


def test_closing_a_stream_early_leaves_the_client_usable(router, endpoint, script):
    router.scripts.append(script(at=1, fault="hang"))
    with Client(endpoint) as client:
        with client.generate("hello") as stream:
            next(stream)
        assert client.complete("hello").text == router.oracle[1]
    client.close()


def test_threads_share_a_client(router, endpoint):
    texts = []
    with Client(endpoint) as client:
        threads = [threading.Thread(target=lambda: texts.append(client.complete("hello").text)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert texts == [router.oracle[1]] * 8


@pytest.mark.parametrize("cls", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("endpoints", "why"),
    [
        ("127.0.0.1:99999", "endpoints: 127.0.0.1:99999: port must be 1 to 65535"),
        (["127.0.0.1:1", "router"], "endpoints: router: has no port; write HOST:PORT, such as router:50051"),
        ("", "endpoints: at least one HOST:PORT is needed"),
    ],
)
def test_a_client_of_a_wrong_endpoint_cannot_be_made(cls, endpoints, why):
    with pytest.raises(errors.InvalidArgument, match=f"^{re.escape(why)}$"):
        cls(endpoints)


def test_a_client_that_is_closed_waits_for_interrupted_calls_to_end():
    client, began, ended = Client("127.0.0.1:1"), threading.Event(), []

    async def interrupted_call():
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)

    asyncio.run_coroutine_threadsafe(interrupted_call(), client._loop._loop)
    assert began.wait(10)
    client.close()
    assert ended == [True]
