"""A TCP connection to the store that is reset, or whose server is gone without a word: the next call goes over another
one, and so does a subscription."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop
from storm.fault_proxy import FaultProxy

from octavo.local import ports
from octavo.local.embedded import EmbeddedStore
from octavo.store.redis import RedisStore

NUM_CALLS = 8


@pytest.fixture
def proxy(tmp_path: Any) -> Iterator[tuple[FaultProxy, asyncio.Runner]]:
    """A proxy in front of a store, both on an event loop of asyncio that runs when the test asks for it."""
    with asyncio.Runner() as runner:
        server_port, proxy_port = ports.pick(2)
        server = EmbeddedStore(tmp_path, port=server_port)
        runner.run(server.start())
        made = FaultProxy("store", proxy_port, ("127.0.0.1", server_port))
        runner.run(made.start())
        yield made, runner
        runner.run(made.close())
        runner.run(server.stop())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_call_after_a_reset_is_answered(
    proxy: tuple[FaultProxy, asyncio.Runner], new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    made, runner = proxy
    store = RedisStore(f"redis://{made.endpoint}/0")

    async def call() -> None:
        await store.open()
        await asyncio.gather(*(store.queue_depth() for _ in range(NUM_CALLS)))

    async def call_again() -> None:
        await asyncio.sleep(0.2)  # the event loop hears of the resets before the connections are used again
        await asyncio.gather(*(store.queue_depth() for _ in range(NUM_CALLS)))
        await store.close()

    async def beside(work: Any) -> None:
        """Runs `work` on a loop of the other kind, in a thread, while the proxy's loop runs."""
        async with asyncio.timeout(60):
            await asyncio.to_thread(client_loop.run_until_complete, work)

    client_loop = new_loop()
    try:
        runner.run(beside(call()))
        assert made.reset() > 2
        runner.run(beside(call_again()))
    finally:
        client_loop.close()
