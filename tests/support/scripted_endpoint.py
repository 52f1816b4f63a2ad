"""Endpoints for `octavo bench` that do what a test says: one in the test's own loop, one as an HTTP server."""

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from octavo_bench.endpoints.base import BenchRequest, RequestFailed, StreamPart, StreamTotals


@dataclass
class ScriptedEndpoint:
    """Answers after `delay_s`, with a token each `gap_s`. `stalls_until` holds back whatever comes before."""

    name: str = "scripted"
    delay_s: float = 0.1
    gap_s: float = 0.01
    stalls: tuple[float, float] | None = None  # from, to: loop time in which nothing leaves
    fails: Callable[[int], str] = lambda number: ""  # the reason of the request with that number
    log: list[str] = field(default_factory=list)
    requests: list[BenchRequest] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    open_streams: int = 0
    url: str = "test://"
    kind: str = "test"
    model: str = "m"
    vocab_size: int | None = 100

    async def open(self, timeout_s: float) -> None: ...

    async def close(self) -> None: ...

    async def stream(self, request: BenchRequest) -> AsyncGenerator[StreamPart, None]:
        number = len(self.requests)
        self.requests.append(request)
        self.log.append(self.name)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self._sleep(self.delay_s)
            if reason := self.fails(number):
                raise RequestFailed(reason, f"request {number}")
            for index in range(request.max_tokens):
                if index:
                    await self._sleep(self.gap_s)
                yield StreamPart(" a", 1)
            yield StreamPart(totals=StreamTotals(7, request.max_tokens, 3))
        finally:
            self.at_once -= 1

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        now = asyncio.get_running_loop().time()
        if self.stalls and self.stalls[0] <= now < self.stalls[1]:
            await asyncio.sleep(self.stalls[1] - now)


def completion_event(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, **more}]}


def completion_events(texts: Sequence[str], usage: int | None = None) -> list[Any]:
    """The events of a stream of /v1/completions."""
    events: list[Any] = [completion_event(text) for text in texts]
    events.append(completion_event("", finish_reason="length"))
    if usage is not None:
        events.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": usage}})
    return [*events, "[DONE]"]


class OpenAiServer:
    """An HTTP server with OpenAI's interface, on a loop in another thread. `answer` makes the events of a request."""

    def __init__(self) -> None:
        self.models: list[str] = ["tiny"]
        self.status = 200
        self.error: Any = {"error": {"message": "the queue is full"}}
        self.key = ""
        self.answer: Callable[[dict[str, Any]], list[Any]] = lambda body: completion_events(
            [" a"] * body["max_tokens"], body["max_tokens"]
        )
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.gap_s = 0.0
        self.hang = threading.Event()  # streams stop after their first event
        self.port = 0
        self.scheme = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                path = lines[0].split()[1]
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._reply(path, headers, json.loads(body) if body else {}, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _reply(self, path: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter) -> None:
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            self._send_json(writer, 401, {"error": {"message": "no key"}})
            return
        if path == "/v1/models":
            self._send_json(writer, 200, {"data": [{"id": name} for name in self.models]})
            return
        self.paths.append(path)
        self.bodies.append(body)
        if self.status != 200:
            self._send_json(writer, self.status, self.error)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in self.answer(body):
            data = event if isinstance(event, str) else json.dumps(event)
            self._chunk(writer, f"data: {data}\n\n".encode())
            await writer.drain()
            await asyncio.sleep(self.gap_s)
            while self.hang.is_set():
                await asyncio.sleep(0.01)
                self._chunk(writer, b": ping\n\n")
                await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    @staticmethod
    def _send_json(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        )
        writer.write(body)


@contextmanager
def openai_server(context: ssl.SSLContext | None = None) -> Iterator[OpenAiServer]:
    """The server, until the end of the context; with an SSL context by HTTPS."""
    server, started = OpenAiServer(), threading.Event()
    server.scheme = "https" if context else "http"
    loop_and_end: list[Any] = []

    async def main() -> None:
        ended = asyncio.Event()
        loop_and_end.extend((asyncio.get_running_loop(), ended))
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=context)
        server.port = listening.sockets[0].getsockname()[1]
        started.set()
        await ended.wait()
        server.hang.clear()
        listening.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop, ended = loop_and_end
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
