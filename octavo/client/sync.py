"""The client for code without asyncio. It runs an AsyncClient on an event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from octavo.client.aio import AsyncClient
from octavo.client.events import Event
from octavo.client.routing import RetryPolicy
from octavo.client.stream import AsyncStream
from octavo.wire.endpoint import Endpoints
from octavo.wire.tls import PLAIN, ClientCredentials

Result = TypeVar("Result")
P = ParamSpec("P")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate["Client", P], Result]:
    """The method of a Client that waits for that of its AsyncClient."""

    @wraps(method)
    def call(client: "Client", /, *args: P.args, **options: P.kwargs) -> Result:
        return client._loop.wait_for(method(client._client, *args, **options))

    return call


def _streaming(
    method: Callable[Concatenate[AsyncClient, P], AsyncStream],
) -> Callable[Concatenate["Client", P], "Stream"]:
    """The same of a method that returns a stream, which is made in the event loop."""

    @wraps(method)
    def call(client: "Client", /, *args: P.args, **options: P.kwargs) -> "Stream":
        async def make_in_loop() -> AsyncStream:
            return method(client._client, *args, **options)

        return Stream(client._loop.wait_for(make_in_loop()), client._loop)

    return call


class Client:
    """An AsyncClient for threads: its methods have the same arguments, and block. Any thread may call it.

    Close it, or use `with`. A stream is a plain iterator; a caller that closes it early disconnects.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        policy: RetryPolicy = RetryPolicy(),  # noqa: B008  frozen: one for all
        credentials: ClientCredentials = PLAIN,
    ) -> None:
        self._client = AsyncClient(endpoints, policy=policy, credentials=credentials)
        self._loop = _LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._loop.running:
            self._loop.wait_for(self._client.close())
            self._loop.stop()

    connect = _blocking(AsyncClient.connect)
    generate = _streaming(AsyncClient.generate)
    complete = _blocking(AsyncClient.complete)
    transcribe = _blocking(AsyncClient.transcribe)
    attach = _streaming(AsyncClient.attach)
    cancel = _blocking(AsyncClient.cancel)
    get = _blocking(AsyncClient.get)
    embed = _blocking(AsyncClient.embed)
    score = _blocking(AsyncClient.score)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    models = _blocking(AsyncClient.models)


class Stream(Iterator[Event]):
    """An AsyncStream for threads: the events of one request, each exactly once and in order."""

    def __init__(self, stream: AsyncStream, loop: "_LoopThread") -> None:
        self._stream = stream
        self._loop = loop

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def num_reattaches(self) -> int:
        return self._stream.num_reattaches

    @property
    def resume_token(self) -> bytes:
        """A token with which another process can continue after the events that were delivered here."""
        return self._stream.resume_token

    def __next__(self) -> Event:
        event = self._loop.wait_for(self._next())
        if event is None:
            raise StopIteration
        return event

    async def _next(self) -> Event | None:
        return await anext(self._stream, None)

    def close(self) -> None:
        """Disconnects. The request goes on if it has `keep_on_disconnect`; else it is cancelled after a grace time."""
        if self._loop.running:
            self._loop.wait_for(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LoopThread:
    """An event loop that runs in a daemon thread until stopped."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="octavo-client", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait_for(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` in the loop and returns its result. An interrupt of the waiting thread cancels the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Ends what still runs in the loop, such as a call whose waiting thread was interrupted, and then the loop."""
        self.wait_for(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_tasks() -> None:
    """Cancels all other tasks of the loop, and returns when they have ended."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
