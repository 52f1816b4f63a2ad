"""Repeats calls of the store through an outage. Store functions are idempotent, so a repeated call does no harm."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from octavo.request.errors import StoreUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

WARNING_INTERVAL_S = 5.0


async def until_answered(
    call: Callable[[], Awaitable[T]], *, patience_s: float | None = None, pause_s: float = 0.1, what: str = ""
) -> T:
    """Returns what `call` returns, and repeats `call` while it raises StoreUnavailable.

    Between two attempts it waits `pause_s`. When an attempt fails after `patience_s`, the caller gets that attempt's
    StoreUnavailable; without `patience_s` the call is repeated for ever. Any other exception passes at once. The log
    has a warning that names `what` at the first failure, and then one per WARNING_INTERVAL_S.
    """
    started = time.monotonic()
    next_warning = started
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            now = time.monotonic()
            if patience_s is not None and now - started >= patience_s:
                raise
            if now >= next_warning:
                log.warning("%s: waiting for the store: %s", what or "a call", error)
                next_warning = now + WARNING_INTERVAL_S
        await asyncio.sleep(pause_s)
