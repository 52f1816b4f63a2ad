"""The client for code without asyncio. It runs an AsyncClient on an event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

from octavo.client.aio import AsyncClient
from octavo.client.arguments import AttachArguments, DetokenizeArguments, Messages, Prompt, RequestArguments
from octavo.client.events import Completion, Event, Model, RequestStatus
from octavo.client.routing import RetryPolicy
from octavo.client.stream import AsyncStream
from octavo.request.sampling import SamplingParams
from octavo.wire.endpoint import Endpoints
from octavo.wire.tls import PLAIN, ClientCredentials

Result = TypeVar("Result")


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

    def connect(self, timeout_s: float = 5.0) -> None:
        """Returns once one of the routers is connected, which no call needs. Raises Unreachable after `timeout_s`."""
        self._loop.wait_for(self._client.connect(timeout_s))

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestArguments]
    ) -> "Stream":
        """Continues `prompt`. The options are those of AsyncClient.generate."""
        return self._stream(lambda: self._client.generate(prompt, sampling, **options))

    def complete(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestArguments]
    ) -> Completion:
        """The whole answer. The options are those of AsyncClient.generate."""
        return self._loop.wait_for(self._client.complete(prompt, sampling, **options))

    def attach(self, request_id: str | None = None, **options: Unpack[AttachArguments]) -> "Stream":
        """The stream of a request that was accepted before. The options are those of AsyncClient.attach."""
        return self._stream(lambda: self._client.attach(request_id, **options))

    def cancel(self, request_id: str) -> None:
        """Stops a request. It is no error if the request has ended already."""
        self._loop.wait_for(self._client.cancel(request_id))

    def get(self, request_id: str) -> RequestStatus:
        """The status of a request, by its record."""
        return self._loop.wait_for(self._client.get(request_id))

    def tokenize(self, text: str | bytes | Messages, *, model: str | None = None) -> list[int]:
        """The token ids of a text, or of the prompt that the chat template makes of messages."""
        return self._loop.wait_for(self._client.tokenize(text, model=model))

    def detokenize(self, token_ids: Sequence[int], **options: Unpack[DetokenizeArguments]) -> str:
        """The text of token ids. The options are those of AsyncClient.detokenize."""
        return self._loop.wait_for(self._client.detokenize(token_ids, **options))

    def models(self) -> list[Model]:
        """The models that the routers serve."""
        return self._loop.wait_for(self._client.models())

    def _stream(self, make: Callable[[], AsyncStream]) -> "Stream":
        async def make_in_loop() -> AsyncStream:
            return make()

        return Stream(self._loop.wait_for(make_in_loop()), self._loop)


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
