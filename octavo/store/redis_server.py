"""A Redis or Valkey server with octavo's functions. Only this file and `redis_connections` import `redis`."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import redis.asyncio as client
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from octavo.request.errors import Mismatch, ServingError, StoreFull, StoreUnavailable
from octavo.request.limits import RETAIN_MS
from octavo.settings.store_url import server_urls
from octavo.store import codec, library
from octavo.store.redis_connections import ConnectionPools, connection_pool
from octavo.store.store_tally import StoreTally

T = TypeVar("T")
MAX_GENERATIONS_PER_CALL = 4
RESET_CONNECTION = "the handler is closed"  # in the RuntimeError of uvloop for a write to a connection that was reset
BARRIER_MS = 60_000
# What clients come to see: it survives the promotion of a replica, if a write waits for replicas.
DURABLE = frozenset(
    f"octavo1_{name}" for name in ("accept", "take", "append_batch", "append_tail", "finish", "cancel", "mig_commit")
)
PING_S = 3.0  # how long a subscriber hears nothing before it asks whether the server is there
SILENT_S = 10.0  # how long a server may be silent that is asked
FULL_RETRY_MS = 2000  # by then, records that have ended have been dropped, or streams have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """Time limits of calls and of what the store keeps, and how many connections requests may use."""

    connect_timeout_s: float = 1.0
    call_timeout_s: float = 2.0
    replicas: int = 0  # how many replicas must have a write before it counts; 0: the primary alone decides
    replica_timeout_ms: int = 1000  # how long a write waits for them; shorter than call_timeout_s
    retain_ms: int = RETAIN_MS
    max_connections: int = 16


class RedisServer:
    """Calls functions of the library."""

    def __init__(
        self,
        url: str,
        options: RedisOptions,
        source: str | None = None,
        tally: StoreTally | None = None,
    ) -> None:
        self.tally = tally or StoreTally()
        self.source = source or library.source()
        self.generation = 0  # the newest that this process knows; 0 before the first call
        self._urls = server_urls(url)
        self._options = options
        self._pools = ConnectionPools(partial(self._connect, options.call_timeout_s), options.max_connections)

    @property
    def client(self) -> Any:
        """Calls whatever the server can do, over the connections of requests."""
        return self._pools.client_of()

    def _connect(self, timeout_s: float | None, max_connections: int, *, num_retries: int = 1) -> Any:
        """A client. A pooled connection may be dead, so calls are tried once more."""
        pool = connection_pool(
            self._urls,
            protocol=2,
            timeout=self._options.call_timeout_s,  # how long a call waits for a free connection
            socket_connect_timeout=self._options.connect_timeout_s,
            socket_timeout=timeout_s,
            max_connections=max_connections,
            retry=Retry(NoBackoff(), num_retries, supported_errors=(ConnectionLost,)),
        )
        return client.Redis.from_pool(pool)

    async def open(self) -> None:
        """Loads the function library if need be. Raises Mismatch if the server is a node of a cluster."""
        await self.guard(self._refuse_cluster)
        await self.guard(self._load_library, self.client)
        await self.call("depth")

    async def close(self) -> None:
        await self._pools.close()

    async def _refuse_cluster(self) -> None:
        info = await self.client.info("cluster")
        if info.get("cluster_enabled"):
            raise Mismatch(
                "the store is a node of a Redis Cluster, which would spread the keys of one function over its nodes: "
                "give a primary of its own (cluster-enabled no); several cells serve what one store cannot"
            )

    async def _load_library(self, server: Any) -> None:
        try:
            current = await server.fcall("octavo1_revision", 0)
        except ResponseError as error:
            if "Function not found" not in str(error):
                raise
            current = 0
        if current > library.REVISION:
            await self._refuse_later_library(server, current)
        elif current < library.REVISION:
            try:
                await server.function_load(self.source, replace=True)
            except OutOfMemoryError as error:  # what was accepted waits, too: this is an outage, not a refusal
                raise StoreUnavailable(f"the store has no memory for the function library: {error}") from error

    async def _refuse_later_library(self, server: Any, current: int) -> None:
        serves = await server.fcall("octavo1_serves", 0)
        if serves > library.REVISION:
            raise Mismatch(
                f"the store has revision {current} of the function library, which serves programs from "
                f"revision {serves} on; this program has {library.REVISION}: start a later version of octavo here"
            )

    async def guard(self, operation: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The result of `operation`.

        Errors of the connection or the server become StoreUnavailable; that there is no memory left, StoreFull.
        """
        try:
            try:
                return await operation(*args)
            except RuntimeError as error:
                if RESET_CONNECTION not in str(error):
                    raise
                return await operation(*args)  # the dead connection has left the pool
        except OutOfMemoryError as error:
            raise StoreFull(
                "the store has no memory left for new requests: retry later, or give it more "
                "(--store-memory-bytes of octavo up, maxmemory of a server)",
                retry_after_ms=FULL_RETRY_MS,
            ) from error
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"the store does not answer ({type(error).__name__}: {error})") from error
        except RuntimeError as error:
            if RESET_CONNECTION not in str(error):
                raise
            raise StoreUnavailable("the store has reset the connection") from error

    async def _fcall(self, name: str, names: Sequence[str], args: Sequence[Any]) -> Any:
        server = self._pools.client_of(name)
        durably = self._options.replicas and name in DURABLE
        send = partial(self._send_durably, server) if durably else self._pools.caller_of(name)
        try:
            return await send(name, len(names), *names, *args)
        except ResponseError as error:
            if "Function not found" not in str(error):
                raise
            await self._load_library(server)  # the server has lost the library: FUNCTION FLUSH, or an empty server
            return await send(name, len(names), *names, *args)

    async def _send_durably(self, server: Any, *call: Any) -> Any:
        """The reply of a function once enough replicas have what it has written, or had found written before.

        WAIT counts from the last write of its own connection. The key that is written between them makes that one: a
        repeated call may find all done by a call on another connection, and write nothing.
        """
        options = self._options
        pipeline = server.pipeline(transaction=False)
        pipeline.fcall(*call)
        pipeline.set(codec.BARRIER_KEY, b"", px=BARRIER_MS)
        pipeline.wait(options.replicas, options.replica_timeout_ms)
        reply, barrier, num_replicas = await pipeline.execute(raise_on_error=False)
        for answer in (reply, barrier, num_replicas):
            if isinstance(answer, Exception):
                raise answer
        if num_replicas < options.replicas:
            if len(self._urls) > 1:  # this primary may have been replaced: the next call looks for the one that counts
                await self._pools.disconnect_idle()
            raise StoreUnavailable(
                f"the store has too few replicas: {num_replicas} of {options.replicas} had a write after "
                f"{options.replica_timeout_ms} ms (--store-replicas)"
            )
        return reply

    async def call(self, name: str, *args: Any, records: Sequence[str] = ()) -> list[Any]:
        """The reply of one function. If the store is in a new generation, the call is repeated with it."""
        options = self._options
        names = [codec.GENERATION_KEY, *records]
        for _ in range(MAX_GENERATIONS_PER_CALL):
            header = (self.generation, options.retain_ms)
            began = time.perf_counter()
            try:
                reply: list[Any] = await self.guard(self._fcall, f"octavo1_{name}", names, [*header, *args])
            except ServingError:
                self.tally.count_error(name)
                raise
            self.tally.observe_call(name, time.perf_counter() - began)
            if reply[0] != b"STALE_GENERATION":
                return reply
            self.generation = max(self.generation, int(reply[1]))  # another call may have learnt it before
            server = self._pools.client_of(f"octavo1_{name}")
            await self.guard(
                self._load_library, server
            )  # a server that has restarted empty may have an older program's
        raise StoreUnavailable("the store restarts again and again")

    async def listen(
        self, *channels: str, on_listening: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[bytes, None]:
        """The messages on the channels, until the caller stops iterating. The iteration has a connection of its own.

        After an outage, and when another server has become the primary, it connects again, and each time `on_listening`
        is called. Messages that are published meanwhile are lost.
        """
        pause_s = 0.05
        while True:
            connection = self._connect(None, 1, num_retries=0)  # else it would subscribe again without a word
            subscriber = connection.pubsub(ignore_subscribe_messages=True)
            try:
                await subscriber.subscribe(*channels)
                on_listening()
                pause_s = 0.05
                async with aclosing(messages(subscriber, partial(self._is_newest, self.generation))) as payloads:
                    async for payload in payloads:
                        yield payload
            except (RedisError, OSError, TimeoutError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and RESET_CONNECTION not in str(error):
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)
            finally:
                await subscriber.aclose()
                await connection.aclose()

    def _is_newest(self, generation: int) -> bool:
        return self.generation == generation


async def messages(subscriber: Any, is_current: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """The messages that a subscriber gets. Raises ConnectionLost when the server has said nothing for SILENT_S.

    A subscriber only reads. If the server is gone without a word, as after a cut of the network, only a ping tells. And
    a server that has become a replica answers pings: what other calls know of the store says whether it is current.
    """
    heard_at = time.monotonic()
    while True:
        message = await subscriber.get_message(timeout=PING_S)
        if message is not None:
            heard_at = time.monotonic()
            if message["type"] == "message":
                yield message["data"]
        elif not is_current():
            raise ConnectionLost("the store has another primary, or has restarted")
        elif time.monotonic() - heard_at > SILENT_S:
            raise ConnectionLost("the store does not answer a ping")
        else:
            await subscriber.ping()
