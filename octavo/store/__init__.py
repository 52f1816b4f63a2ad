"""The store: one record per sequence, where every router and worker can reach it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from octavo.request.errors import StoreUnavailable
from octavo.settings.store_url import require_store_url
from octavo.store.base import Store


def open_store(url: str, **options: Any) -> Store:
    """The store at a URL: redis://HOST:PORT[,HOST:PORT...], rediss://, unix:///path, or memory:// for one process.

    It is not connected before `await store.open()`. `options` are the fields of RedisOptions and the `tally` of its
    calls. Raises ValueError, which shows no part of the URL that may be a secret, if this is no URL of a store, and
    StoreUnavailable if the package for it is not installed.
    """
    require_store_url(url)
    if url.startswith("memory:"):
        from octavo.store.memory import MemoryStore

        return MemoryStore()
    try:
        from octavo.store.redis import RedisStore
        from octavo.store.redis_server import RedisOptions
    except ImportError:
        raise StoreUnavailable("a store on a server needs the package redis: pip install 'octavo[router]'") from None

    tally = options.pop("tally", None)
    return RedisStore(url, RedisOptions(**options), tally=tally)


@asynccontextmanager
async def connected_store(url: str) -> AsyncIterator[Store]:
    """The store at a URL, while the context lasts. Raises what `open_store` and `Store.open` raise."""
    store = open_store(url)
    try:
        await store.open()
        yield store
    finally:
        await store.close()
