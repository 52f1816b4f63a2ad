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
from octavo.store import redis_server
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions, RedisServer

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


class ForgetfulServer:
    """Speaks enough of the protocol for subscribers. The first one hears that it has subscribed, and no more."""

    def __init__(self) -> None:
        self.num_subscribed = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        deaf = False
        while line := await reader.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            if words[0] == b"SUBSCRIBE":
                self.num_subscribed += 1
                writer.write(b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n")
                deaf = self.num_subscribed == 1
                if not deaf:
                    writer.write(b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$5\r\nheard\r\n")
            elif words[0] == b"PING" and not deaf:
                writer.write(b"*2\r\n$4\r\npong\r\n$0\r\n\r\n")
            elif words[0] != b"PING":
                writer.write(b"+OK\r\n")


@pytest.mark.parametrize("silent_s", [0.2, 60.0])
async def test_a_subscriber_whose_server_is_gone_without_a_word_subscribes_again(
    silent_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that may be silent for longer waits: it is the silence that tells."""
    monkeypatch.setattr(redis_server, "PING_S", 0.05)
    monkeypatch.setattr(redis_server, "SILENT_S", silent_s)
    forgetful = ForgetfulServer()
    listener = await asyncio.start_server(forgetful.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    subscriber = RedisServer(f"redis://127.0.0.1:{port}/0", RedisOptions()).listen("c")
    heard = asyncio.create_task(anext(subscriber))
    done, _ = await asyncio.wait({heard}, timeout=30 if silent_s < 1 else 1)
    assert (bool(done), forgetful.num_subscribed) == ((True, 2) if silent_s < 1 else (False, 1))
    if done:
        assert heard.result() == b"heard"
    heard.cancel()
    await asyncio.gather(heard, return_exceptions=True)
    await subscriber.aclose()
    listener.close()
    for writer in forgetful.writers:
        writer.close()
        await writer.wait_closed()


async def test_a_subscriber_of_a_quiet_server_stays(server: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "PING_S", 0.02)
    monkeypatch.setattr(redis_server, "SILENT_S", 0.5)
    calls = RedisServer(server.url, RedisOptions())
    subscriber = calls.listen("quiet")
    heard = asyncio.create_task(anext(subscriber))
    while not (await calls.client.pubsub_numsub("quiet"))[0][1]:  # noqa: ASYNC110  another task subscribes
        await asyncio.sleep(0.01)
    subscribed = await calls.client.client_list(_type="pubsub")
    await asyncio.sleep(1.0)  # twice as long as a server may be silent that is asked
    assert [each["id"] for each in await calls.client.client_list(_type="pubsub")] == [
        each["id"] for each in subscribed
    ]
    await calls.client.publish("quiet", b"heard")
    assert await asyncio.wait_for(heard, 10) == b"heard"
    await subscriber.aclose()
    await calls.close()
