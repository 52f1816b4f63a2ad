"""The fault proxy does what it says, and counts it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from storm.fault_proxy import BLACK_HOLE, DROPPED_REPLIES, Condition, FaultProxy

from octavo.local import ports


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[FaultProxy, list[bytes]]]:
    """A proxy in front of a server that answers each line with its length, and the lines that came to the server."""
    lines: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            lines.append(line)
            writer.write(b"%d\n" % len(line))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = FaultProxy("test", ports.pick(1)[0], server.sockets[0].getsockname())
    await proxy.start()
    try:
        yield proxy, lines
    finally:
        await proxy.close()
        server.close()


async def connect(proxy: FaultProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def broken(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends with a reset."""
    try:
        async with asyncio.timeout(30):
            return not await reader.read()
    except ConnectionResetError:
        return True


async def test_it_changes_one_bit_of_what_comes() -> None:
    async with proxied() as (proxy, lines):
        _, writer = await connect(proxy)
        proxy.condition = Condition(damages=1.0)
        writer.write(b"\x00" * 64)
        async with asyncio.timeout(30):
            while not proxy.counts["damaged"]:
                await asyncio.sleep(0.01)
        proxy.condition = Condition()
        writer.write(b"\n")
        async with asyncio.timeout(30):
            while not lines:
                await asyncio.sleep(0.01)
        came = int.from_bytes(b"".join(lines)[:64], "big")
        assert came.bit_count() == 1
        assert proxy.counts["damaged"] == 1


async def test_it_passes_on_what_comes_and_can_be_slow() -> None:
    async with proxied() as (proxy, _):
        reader, writer = await connect(proxy)
        for condition, least_s, count in (
            (Condition(), 0.0, "bytes"),
            (Condition(latency_s=0.1), 0.2, "delayed"),
            (Condition(bytes_per_s=20.0), 0.2, "slowed"),
        ):
            proxy.condition = condition
            began = time.monotonic()
            writer.write(b"abc\n")
            assert await reader.readline() == b"4\n"
            assert time.monotonic() - began >= least_s
            assert proxy.counts[count] > 0
        writer.close()


async def test_a_black_hole_swallows_and_breaks_when_it_ends() -> None:
    async with proxied() as (proxy, lines):
        reader, writer = await connect(proxy)
        writer.write(b"a\n")
        await reader.readline()
        proxy.condition = BLACK_HOLE
        writer.write(b"lost\n")
        late = await connect(proxy)
        late[1].write(b"lost as well\n")
        while proxy.counts["lost"] < 18:
            await asyncio.sleep(0.01)
        assert proxy.counts["lost_connections"] == 1
        proxy.heal()
        assert await broken(reader)
        assert await broken(late[0])
        assert lines == [b"a\n"]


async def test_a_dropped_reply_was_executed() -> None:
    async with proxied() as (proxy, lines):
        reader, writer = await connect(proxy)
        proxy.condition = DROPPED_REPLIES
        writer.write(b"done\n")
        while not proxy.counts["lost"]:
            await asyncio.sleep(0.01)
        assert lines == [b"done\n"]
        proxy.heal()
        assert await broken(reader)


@pytest.mark.parametrize("moves", [False, True])
async def test_a_reset_breaks_all_connections(moves: bool) -> None:
    async with proxied() as (proxy, _):
        reader, writer = await connect(proxy)
        writer.write(b"a\n")
        await reader.readline()
        if moves:
            proxy.point_at(proxy.target)
        else:
            assert proxy.reset() == 1
        assert await broken(reader)
        assert proxy.counts["resets"] == 1
