"""The channels of the SDK follow protos/service_config.json, and leave retries to the SDK."""

import time

import grpc
from refusing_router import refusing

from octavo.client import AsyncClient
from octavo.client.routing import EndpointPool
from octavo.request import errors

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def test_the_sdk_alone_retries_a_refused_call():
    """gRPC counts the attempts that it makes itself: none. Two layers of retries would multiply, past the budget."""
    with refusing(2, UNAVAILABLE) as (router, endpoint):
        async with AsyncClient(endpoint) as client:
            await client.cancel("a")
    assert router.attempts == [0, 0, 0]


async def test_every_address_of_a_name_gets_calls():
    """One name may stand for several routers, as that of a headless service does."""
    with refusing(0, UNAVAILABLE) as (first, one), refusing(0, UNAVAILABLE) as (second, other):
        async with AsyncClient([f"ipv4:{one},{other}"]) as client:
            until = time.monotonic() + 20  # both have connected long before
            while not (first.attempts and second.attempts) and time.monotonic() < until:
                await client.cancel("a")
    assert first.attempts
    assert second.attempts


def test_an_endpoint_that_answers_again_is_foreign_no_more():
    pool = EndpointPool(["a:1", "b:1"])
    assert isinstance(pool.unreadable("b:1"), errors.Unreachable)
    pool.note_answer("b:1")
    assert isinstance(pool.unreadable("a:1"), errors.Unreachable)
    assert isinstance(pool.unreadable("b:1"), errors.Unimplemented)
