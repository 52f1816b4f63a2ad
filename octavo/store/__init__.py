"""The store: one record per sequence, where every router and worker can reach it."""

from typing import Any

from octavo.store.base import Store


def open_store(url: str, **options: Any) -> Store:
    """The store at a URL: redis://, rediss://, unix:///path/to/socket, or memory:// for one process alone.

    It is not connected before `await store.open()`. `options` are the fields of RedisOptions, and `on_generation`.
    """
    scheme = url.split(":", 1)[0]
    if scheme == "memory":
        from octavo.store.memory import MemoryStore

        return MemoryStore(**options)
    if scheme in ("redis", "rediss", "unix"):
        from octavo.store.redis import RedisStore
        from octavo.store.redis_server import RedisOptions

        on_generation = options.pop("on_generation", None)
        return RedisStore(url, RedisOptions(**options), on_generation)
    raise ValueError(f"store URL {url!r}: the scheme is not one of memory, redis, rediss, unix")
