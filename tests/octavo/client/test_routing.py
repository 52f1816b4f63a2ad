"""The channels of the SDK follow protos/service_config.json, and leave retries to the SDK."""

import time

from octavo.client import AsyncClient
from octavo.client.routing import EndpointPool
from octavo.request import errors


async def test_the_sdk_alone_retries_a_refused_call(router, serve, script):
    """gRPC counts the attempts that it makes itself: none. Two layers of retries would multiply, past the budget."""
    router.scripts.extend([script(error=errors.NoWorkers("refused by the test"))] * 2)
    async with serve(router) as endpoint, AsyncClient(endpoint) as client:
        await client.cancel("a")
    assert router.attempts == [0, 0, 0]


async def test_every_address_of_a_name_gets_calls(make_router, serve):
    """One name may stand for several routers, as that of a headless service does."""
    first, second = make_router(), make_router()
    async with serve(first) as one, serve(second) as other, AsyncClient([f"ipv4:{one},{other}"]) as client:
        until = time.monotonic() + 20  # both have connected long before
        while not (first.calls and second.calls) and time.monotonic() < until:
            await client.cancel("a")
    assert first.calls
    assert second.calls


def test_an_endpoint_that_answers_again_is_foreign_no_more():
    pool = EndpointPool(["a:1", "b:1"])
    assert isinstance(pool.unreadable("b:1"), errors.Unreachable)
    pool.note_answer("b:1")
    assert isinstance(pool.unreadable("a:1"), errors.Unreachable)
    assert isinstance(pool.unreadable("b:1"), errors.Unimplemented)
