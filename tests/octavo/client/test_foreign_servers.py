"""An endpoint at which no router answers, but another program, counts as unreachable: calls go on at the next one."""

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest
from effort import diagonal

from octavo.client import AsyncClient, Client, RetryPolicy
from octavo.request import errors

QUICK = RetryPolicy(progress_timeout_s=20.0, backoff_base_s=0.001, backoff_cap_s=0.01)
HTTP = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


@contextlib.asynccontextmanager
async def grpc_server(answer=None):
    """Another service of gRPC; with an answer, one that gives it to every call of Inference."""

    async def reply(request, context):
        if isinstance(answer, bytes):
            return answer
        await context.abort(answer, "go away")
        return b""

    class Answering(grpc.GenericRpcHandler):
        def service(self, details):
            return grpc.unary_unary_rpc_method_handler(reply) if answer is not None else None

    server = grpc.aio.server()
    server.add_generic_rpc_handlers([Answering()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def tcp_server(says):
    """A server that says this to whoever connects, and hangs up."""

    async def answer(_, writer):
        writer.write(says)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


FOREIGN = {
    "another service": grpc_server,
    "a proxy that denies": lambda: grpc_server(grpc.StatusCode.PERMISSION_DENIED),
    "a proxy that knows nobody": lambda: grpc_server(grpc.StatusCode.UNAUTHENTICATED),
    "a service that answers all": lambda: grpc_server(b"\xff\xff\xff"),
    "an HTTP server": lambda: tcp_server(HTTP),
    "a server of something else": lambda: tcp_server(b"220 ready\r\n"),
}
CALLS = {
    "Generate": lambda client: client.generate("hello"),
    "Complete": lambda client: client.complete("hello"),
    "Attach": lambda client: client.attach("known"),
    "Cancel": lambda client: client.cancel("known"),
    "Get": lambda client: client.get("known"),
}


async def call_async(endpoints, call):
    async with AsyncClient(endpoints, policy=QUICK) as client:
        answer = call(client)
        return [event async for event in answer] if hasattr(answer, "__aiter__") else await answer


def call_sync(endpoints, call):
    with Client(endpoints, policy=QUICK) as client:
        answer = call(client)
        return list(answer) if hasattr(answer, "__next__") else answer


@pytest.mark.parametrize(("kind", "method"), diagonal(list(FOREIGN), list(CALLS)))
async def test_a_call_goes_on_at_the_next_endpoint(router, serve, kind, method):
    router.accepted.add("known")
    async with FOREIGN[kind]() as foreign, serve(router) as endpoint:
        await call_async([foreign, endpoint], CALLS[method])
        await asyncio.to_thread(call_sync, [foreign, endpoint], CALLS[method])
    assert len(router.calls) == 2


async def test_what_a_router_says_is_no_foreign_answer(router, serve, script):
    router.scripts.append(script(error=errors.PermissionDenied("not for you")))
    async with serve(router) as one, serve(router) as other:
        with pytest.raises(errors.PermissionDenied, match=r"^not for you$"):
            await call_async([one, other], CALLS["Cancel"])
    assert len(router.calls) == 1


@pytest.mark.parametrize("method", ["Generate", "Cancel"])
async def test_of_foreign_servers_alone_the_error_names_all(method):
    async with grpc_server() as one, grpc_server() as other:
        with pytest.raises(errors.Unimplemented) as caught:
            await call_async([one, other], CALLS[method])
        assert f"{one}, {other}: what answers here is no router" in caught.value.message
        with pytest.raises(errors.Unimplemented, match=one):
            await asyncio.to_thread(call_sync, [one], CALLS[method])
