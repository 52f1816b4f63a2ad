"""A client that speaks plain HTTP to the routers of a world."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer


@dataclass
class Answer:
    """The answer to one request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def object(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        assert set(self.object) == {"error"}
        assert set(self.object["error"]) == {"message", "type", "param", "code"}
        return self.object["error"]

    @property
    def chunks(self) -> list[Any]:
        """The chunks of a stream, without the [DONE] that it must end with."""
        *chunks, last = events(self.body)
        assert last == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]


def events(body: bytes) -> list[str]:
    """The data of server-sent events. Comments are left out."""
    parts = [part for part in body.decode().split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") for part in parts)
    return [part.removeprefix("data: ") for part in parts]


class Connection:
    """One connection to a router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, method: str, path: str, body: object = None, **headers: str) -> None:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        usual = {"host": "localhost", "content-length": str(len(data)), "content-type": "application/json"}
        named = {**usual, **{k.replace("_", "-"): v for k, v in headers.items()}}
        head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = (line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in fields}

    async def chunk(self) -> bytes:
        """The next piece of an answer whose length is not known before; empty at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def answer(self) -> Answer:
        status, headers = await self.head()
        if status == 204:
            return Answer(status, headers, b"")
        if "content-length" in headers:
            return Answer(status, headers, await self.reader.readexactly(int(headers["content-length"])))
        body = b""
        while piece := await self.chunk():
            body += piece
        return Answer(status, headers, body)

    async def close(self) -> None:
        self.writer.transport.abort()


Connect = Callable[..., Awaitable[Connection]]
Call = Callable[..., Awaitable[Answer]]


@pytest.fixture
async def connect(world: Any) -> AsyncIterator[Connect]:
    """Opens a connection to a router of the world."""
    opened: list[Connection] = []

    async def open_one(router: int = 0) -> Connection:
        host, port = world.routers[router].http_endpoint.rsplit(":", 1)
        opened.append(Connection(*await asyncio.open_connection(host, int(port))))
        return opened[-1]

    yield open_one
    for each in opened:
        await each.close()


@pytest.fixture
async def call(connect: Connect) -> Call:
    """Makes one request: method, path, body. Keyword arguments are headers, and the router."""

    async def one(method: str, path: str, body: object = None, *, router: int = 0, **headers: str) -> Answer:
        connection = await connect(router)
        connection.send(method, path, body, **headers)
        answer = await connection.answer()
        await connection.close()
        return answer

    return one


@pytest.fixture
async def post(world: Any, call: Call) -> Call:
    """Posts to a world of a router and a worker that have started: path, body. Keyword arguments are headers."""
    await world.start()
    return functools.partial(call, "POST")


class Templated(NamedTuple):
    """What a template was given."""

    messages: list[tuple[str, str]]
    begin_answer: bool
    tools: list[Any]
    details: list[Any]
    variables: dict[str, Any] | None


@pytest.fixture
def templates(monkeypatch: pytest.MonkeyPatch) -> list[Templated]:
    """Gives the byte tokenizer a chat template, which a variable may end; what it was given."""
    seen: list[Templated] = []

    def apply_chat(
        self: ByteTokenizer,
        messages: Any,
        begin_answer: bool = True,
        tools: Any = (),
        details: Any = (),
        variables: Any = None,
    ) -> list[int]:
        seen.append(Templated(list(messages), begin_answer, list(tools), list(details), variables))
        text = "".join(f"{role[0]}:{content}\n" for role, content in messages)
        return self.encode(text + str((variables or {}).get("ends_with", "")))

    monkeypatch.setattr(ByteTokenizer, "apply_chat", apply_chat)
    monkeypatch.setattr(ByteTokenizer, "has_chat_template", True)
    return seen
