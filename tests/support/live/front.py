"""An address before several routers, as a load balancer is: a new connection goes to one that accepts it."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


@contextmanager
def front_of(endpoints: Sequence[str]) -> Iterator[str]:
    """HOST:PORT, until the end of the context. A connection breaks when its router does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    front = _Front(endpoints)
    try:
        yield asyncio.run_coroutine_threadsafe(front.start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(front.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Front:
    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = list(endpoints)  # the one that accepted the last connection is the first
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for endpoint in list(self._endpoints):
                host, _, port = endpoint.partition(":")
                with suppress(OSError):
                    from_router, to_router = await asyncio.open_connection(host, int(port))
                    self._endpoints.remove(endpoint)
                    self._endpoints.insert(0, endpoint)
                    break
            else:
                return
            pumps = [asyncio.create_task(_pump(*ends)) for ends in ((reader, to_router), (from_router, writer))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                to_router.close()
        finally:
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
