"""A TCP connection to the store that is reset: the next call goes over another one."""

import asyncio

import pytest
import uvloop
from storm.fault_proxy import FaultProxy

from octavo.local import ports
from octavo.local.embedded import EmbeddedStore
from octavo.store.redis import RedisStore


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_call_after_a_reset_is_answered(tmp_path, new_loop):
    """The clients run on a loop of either kind, in a thread, while asyncio's loop runs the proxy."""
    server_port, proxy_port = ports.pick(2)
    server = EmbeddedStore(tmp_path, port=server_port)
    proxy = FaultProxy("store", proxy_port, ("127.0.0.1", server_port))
    store = RedisStore(f"redis://{proxy.endpoint}/0")

    async def call():
        await asyncio.gather(*(store.queue_depth() for _ in range(8)))

    async def story(client_loop):
        await server.start()
        await proxy.start()
        async with asyncio.timeout(60):
            await asyncio.to_thread(client_loop.run_until_complete, call())
            assert proxy.reset() > 2
            # the event loop hears of the resets before the connections are used again
            await asyncio.to_thread(client_loop.run_until_complete, asyncio.sleep(0.2))
            await asyncio.to_thread(client_loop.run_until_complete, call())
            await asyncio.to_thread(client_loop.run_until_complete, store.close())
        await proxy.close()
        await server.stop()

    with asyncio.Runner(loop_factory=new_loop) as client:
        asyncio.run(story(client.get_loop()))
