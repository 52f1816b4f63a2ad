"""A Redis or Valkey server with octavo's function library on it. No other file imports the client library `redis`."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis.asyncio as client
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError, ResponseError

from octavo.errors import StoreUnavailable
from octavo.store import keys, library

T = TypeVar("T")
MAX_GENERATIONS_PER_CALL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """Time limits, and the number of shards that records are spread over, which must be equal in all processes."""

    num_shards: int = 1
    connect_timeout_s: float = 1.0
    call_timeout_s: float = 2.0
    freeze_ms: int = 3000
    retain_ms: int = 600_000
    max_connections: int = 16


class RedisServer:
    """Calls functions of the library. It calls `on_generation` with the new generation when the store has restarted."""

    def __init__(
        self,
        url: str,
        options: RedisOptions,
        on_generation: Callable[[int], None] | None = None,
        source: str | None = None,
    ) -> None:
        if not 1 <= options.num_shards <= keys.MAX_SHARDS:
            raise ValueError(f"num_shards: {options.num_shards} is not within 1..{keys.MAX_SHARDS}")
        self.source = source or library.source()
        self.generations = [0] * options.num_shards
        self._url = url
        self._options = options
        self._on_generation = on_generation
        self.client = self._connect(options.call_timeout_s)

    def _connect(self, timeout_s: float | None) -> Any:
        pool = client.BlockingConnectionPool.from_url(
            self._url,
            protocol=2,
            timeout=self._options.call_timeout_s,  # how long a call waits for a free connection
            socket_connect_timeout=self._options.connect_timeout_s,
            socket_timeout=timeout_s,
            max_connections=self._options.max_connections,
            retry=Retry(
                NoBackoff(), 1, supported_errors=(ConnectionLost,)
            ),  # a pooled connection may be dead: one retry
        )
        return client.Redis.from_pool(pool)

    @property
    def generation(self) -> int:
        return sum(self.generations)

    async def open(self) -> None:
        await self.guard(self._load_library)
        await self.each_shard("depth")

    async def close(self) -> None:
        await self.client.aclose()

    async def _load_library(self) -> None:
        try:
            current = await self.client.fcall("octavo1_revision", 0)
        except ResponseError as error:
            if "Function not found" not in str(error):
                raise
            current = 0
        if current < library.REVISION:
            await self.client.function_load(self.source, replace=True)

    async def guard(self, operation: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The result of `operation`. Errors of the connection or the server become StoreUnavailable."""
        try:
            return await operation(*args)
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"the store does not answer ({type(error).__name__}: {error})") from error

    async def _fcall(self, name: str, names: Sequence[str], args: Sequence[Any]) -> Any:
        try:
            return await self.client.fcall(name, len(names), *names, *args)
        except ResponseError as error:
            if "Function not found" not in str(error):
                raise
            await self._load_library()  # the server has lost the library: FUNCTION FLUSH, or an empty server
            return await self.client.fcall(name, len(names), *names, *args)

    async def call(self, shard: int, name: str, *args: Any, records: Sequence[str] = ()) -> list[Any]:
        """The reply of one function. If the store is in a new generation, the call is repeated with it."""
        options = self._options
        names = [keys.generation(shard), *records]
        for _ in range(MAX_GENERATIONS_PER_CALL):
            header = (self.generations[shard], options.freeze_ms, options.retain_ms)
            reply: list[Any] = await self.guard(self._fcall, f"octavo1_{name}", names, [*header, *args])
            if reply[0] != b"STALE_GENERATION":
                return reply
            self._learn_generation(shard, int(reply[1]))
        raise StoreUnavailable("the store restarts again and again")

    def _learn_generation(self, shard: int, generation: int) -> None:
        first = self.generations[shard] == 0
        if generation <= self.generations[shard]:  # another call has learnt it before
            return
        self.generations[shard] = generation
        if self._on_generation is not None and not first:
            self._on_generation(self.generation)

    async def each_shard(self, name: str, *args: Any) -> list[list[Any]]:
        return await asyncio.gather(*(self.call(shard, name, *args) for shard in range(self._options.num_shards)))

    async def listen(self, *channels: str) -> AsyncGenerator[bytes, None]:
        """The messages on the channels, until the caller stops iterating. The iteration has a connection of its own.

        After an outage it connects again. Messages that are published during an outage are lost.
        """
        pause_s = 0.05
        while True:
            connection = self._connect(None)
            subscriber = connection.pubsub(ignore_subscribe_messages=True)
            try:
                await subscriber.subscribe(*channels)
                pause_s = 0.05
                async for message in subscriber.listen():
                    yield message["data"]
            except (RedisError, OSError, TimeoutError):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)
            finally:
                await subscriber.aclose()
                await connection.aclose()
