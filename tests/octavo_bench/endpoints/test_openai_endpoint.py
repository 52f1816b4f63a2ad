"""Server-sent events come out whole, in whatever pieces their bytes arrive, and connections may be used again."""

import asyncio
from itertools import pairwise

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.process.command_error import CommandError
from octavo_bench.endpoints import openai_endpoint
from octavo_bench.endpoints.base import BenchRequest, RequestFailed, RequestOptions
from octavo_bench.endpoints.openai_endpoint import OpenAiEndpoint, ServerSentEvents

STREAM = (
    b': hello\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:two\ndata: lines\n\n\n\nid: 3\ndata: [DONE]\n\ndata: unfinished'
)
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_pieces_give_the_same_events(cuts):
    reader, found = ServerSentEvents(), []
    places = [0, *sorted(cuts), len(STREAM)]
    for begin, end in pairwise(places):
        found += reader.feed(STREAM[begin:end])
    assert found == EVENTS


def test_an_event_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(openai_endpoint, "MAX_EVENT_BYTES", 100)
    reader = ServerSentEvents()
    with pytest.raises(RequestFailed):
        for _ in range(100):
            list(reader.feed(b"data: xxxxxxxxxx"))


class ClosingServer:
    """Answers each request on a new connection. On the second of a connection it closes, and says nothing before."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.answers = True  # else it closes at once

    async def serve(self, reader, writer):
        self.num_connections += 1
        for number in range(2):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = head.split(b"content-length: ")[1].split(b"\r")[0] if b"content-length: " in head else b"0"
            await reader.readexactly(int(length))
            if number or not self.answers:
                break
            body = b"data: [DONE]\n\n" if head.startswith(b"post") else b'{"data": []}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()


async def test_a_request_on_a_connection_that_was_closed_meanwhile_is_sent_again():
    served = ClosingServer()
    async with await asyncio.start_server(served.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        endpoint = OpenAiEndpoint(url, "model", RequestOptions(0.0, False, False), keep_alive=True)
        await endpoint.open(10.0)
        try:
            for _ in range(4):
                assert not [part async for part in endpoint.stream(BenchRequest("prompt", 1))]
            assert served.num_connections > 3, "each was closed at its second request"
            served.answers = False
            with pytest.raises(RequestFailed, match="connection lost"):
                [part async for part in endpoint.stream(BenchRequest("prompt", 1))]
        finally:
            await endpoint.close()


async def test_a_server_that_speaks_before_it_is_asked_speaks_no_http_1(monkeypatch):
    """As gRPC's do. Whether its words or the request come first is a race: here the request finds itself refused."""
    endpoint = OpenAiEndpoint("http://127.0.0.1:9", "", RequestOptions(0.0, False, False))

    def refuse(*_, **__):
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(aiohttp.ClientSession, "get", refuse)
    try:
        with pytest.raises(CommandError, match="speaks no HTTP/1: octavo by gRPC is grpc://HOST:PORT"):
            await endpoint.open(1.0)
    finally:
        await endpoint.close()
