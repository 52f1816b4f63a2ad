"""Things that operators have named, as the store has them: read anew every second, by all routers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class NamedEntries(Generic[T]):
    """What this router knows of them, by their keys in the store."""

    def __init__(self, read: Callable[[], Awaitable[dict[str, bytes]]], parse: Callable[[bytes], T], what: str) -> None:
        """`parse` raises ValueError, TypeError or KeyError for what another program has written."""
        self.known: dict[str, T] = {}
        self._read = read
        self._parse = parse
        self._what = what
        self._packed: dict[str, bytes] = {}
        self._one = asyncio.Lock()  # what is read later is newer

    async def refresh(self) -> bool:
        """Reads what the store has now, or later; returns whether it has changed. Raises StoreUnavailable."""
        async with self._one:
            packed = await self._read()
            if packed == self._packed:
                return False
            self._packed, self.known = packed, {}
            for key, value in packed.items():
                try:
                    self.known[key] = self._parse(value)
                except (ValueError, TypeError, KeyError) as error:
                    log.warning("the %s %r in the store cannot be read: %r", self._what, key, error)
            return True
