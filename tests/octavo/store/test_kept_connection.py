"""A connection that is kept for a call: it is asked of the pool once, and no call gets the reply of another."""

import asyncio

import pytest
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import ReadOnlyError, ResponseError

from octavo.store.redis_connections import KeptConnection

LIBRARY = """#!lua name=kept
redis.register_function('kept_echo', function(keys, args) return args[1] end)
redis.register_function('kept_demoted', function() return redis.error_reply('READONLY as a replica') end)
"""


class CountingPool(BlockingConnectionPool):
    num_asked = 0

    async def get_connection(self, *args, **options):
        self.num_asked += 1
        return await super().get_connection(*args, **options)


@pytest.fixture
async def client(store):
    own = store.server.client.connection_pool
    pool = CountingPool(connection_class=own.connection_class, max_connections=4, **own.connection_kwargs)
    made = Redis.from_pool(pool)
    await made.function_load(LIBRARY, replace=True)
    pool.num_asked = 0
    yield made
    await made.aclose()


async def test_calls_ask_the_pool_once_and_get_their_own_replies(client):
    """Of one another, and where the function fails; a server that is no primary any more is left."""
    kept = KeptConnection(client)
    for number in range(20):
        assert await kept.fcall("kept_echo", 0, str(number)) == b"%d" % number
        with pytest.raises(ResponseError, match="Function not found"):
            await kept.fcall("nobody", 0)
    assert client.connection_pool.num_asked == 1
    with pytest.raises(ReadOnlyError):
        await kept.fcall("kept_demoted", 0)
    assert await kept.fcall("kept_echo", 0, "next") == b"next"
    assert client.connection_pool.num_asked == 2
    replies = await asyncio.gather(*(kept.fcall("kept_echo", 0, str(number)) for number in range(20)))
    assert replies == [b"%d" % number for number in range(20)]


async def test_a_connection_that_died_is_replaced(client):
    kept = KeptConnection(client)
    for number in range(3):
        assert await kept.fcall("kept_echo", 0, str(number)) == b"%d" % number
        await client.client_kill_filter(_type="normal", skipme=True)
    assert await kept.fcall("kept_echo", 0, "last") == b"last"


async def test_a_call_that_is_cancelled_leaves_no_reply_for_the_next(client):
    kept = KeptConnection(client)
    for rounds in range(8):
        await kept.fcall("kept_echo", 0, "first")
        call = asyncio.create_task(kept.fcall("kept_echo", 0, "cancelled"))
        for _ in range(rounds):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await kept.fcall("kept_echo", 0, "next") == b"next"
