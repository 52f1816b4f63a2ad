"""Connections to other workers: kept while they are used, made anew when they fail, closed when idle."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from migration_peers import BytesMemory
from waiting import until

from gpu_worker.migration.blocks.block_listener import BlockListener
from gpu_worker.migration.blocks.block_sender import BlockSender
from gpu_worker.migration.blocks.link_share import LinkShare
from gpu_worker.migration.calls import connection_pool
from gpu_worker.migration.calls.connection_pool import ConnectionPool
from gpu_worker.migration.calls.targets import TargetWorker
from octavo.request.errors import TransferFailed
from octavo.request.ids import Incarnation
from octavo.wire.endpoint import Endpoint

TARGET = TargetWorker(Incarnation("b"), Endpoint("127.0.0.1", 1))


@pytest.fixture
async def pool():
    made = ConnectionPool(BytesMemory(4, 1, 64), LinkShare(None, lambda: False))
    yield made
    await made.close()
    assert not made._connections
    assert not made._tasks


@pytest.fixture
def listener():
    made = BlockListener("127.0.0.1")
    yield made
    made.close()


async def test_a_connection_is_shared_kept_and_closed_when_idle(pool, listener, monkeypatch):
    async with pool.connect(TARGET) as one, pool.connect(TARGET) as other:
        assert one is other
        senders = await asyncio.gather(*(one.open_sender(listener.port) for _ in range(4)))
        assert len({id(sender) for sender in senders}) == 1
        await until(lambda: listener.num_connections == 1)
    async with pool.connect(TARGET) as again:
        assert again is one
        assert await again.open_sender(listener.port) is senders[0]
        monkeypatch.setattr(connection_pool, "IDLE_S", 0.01)
    await until(lambda: listener.num_connections == 0)
    async with pool.connect(TARGET) as later:
        assert later is not one


async def test_a_sender_that_has_failed_is_replaced(pool, listener):
    async with pool.connect(TARGET) as connection:
        sender = await connection.open_sender(listener.port)
        listener.close()
        await until(lambda: sender.has_failed)
        with pytest.raises(TransferFailed, match="cannot be reached"):
            await connection.open_sender(listener.port)
        with closing(BlockListener("127.0.0.1")) as second:
            other = await connection.open_sender(second.port)
            assert other is not sender and not other.has_failed
            await pool.close()


@pytest.mark.parametrize("asked_again", [True, False])
async def test_a_sender_that_is_made_for_a_cancelled_caller_is_used_or_closed(pool, listener, monkeypatch, asked_again):
    makes, goes_on = threading.Event(), threading.Event()
    made: list[BlockSender] = []

    def make_slowly(*args):
        makes.set()
        assert goes_on.wait(60)
        made.append(BlockSender(*args))
        return made[-1]

    monkeypatch.setattr(connection_pool, "BlockSender", make_slowly)
    async with pool.connect(TARGET) as connection:
        asking = asyncio.create_task(connection.open_sender(listener.port))
        assert await asyncio.to_thread(makes.wait, 60)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        makes.clear()
        again = [asyncio.create_task(connection.open_sender(listener.port))] if asked_again else []
        goes_on.set()
        for each in again:
            assert not (await each).has_failed
            assert not makes.is_set(), "there is one already"
    await pool.close()
    await until(lambda: made)
    assert all(sender.has_failed for sender in made), "one was not closed"


async def test_a_sender_is_closed_although_the_caller_that_replaces_it_is_cancelled(pool, listener):
    """No thread was free to close it yet when the caller was cancelled."""
    goes_on = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        async with pool.connect(TARGET) as connection:
            sender = await connection.open_sender(listener.port)
            busy = asyncio.create_task(asyncio.to_thread(goes_on.wait, 60))
            asking = asyncio.create_task(connection.open_sender(listener.port + 1))
            await until(lambda: connection._sender is None)
            asking.cancel()
            await asyncio.wait({asking})
            goes_on.set()
            await busy
        await until(lambda: sender.has_failed)
        await pool.close()
