"""Ends a router whose event loop hangs: gRPC's own threads answer pings for it, so no client would ever leave it."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

ROUND_S = 0.5
HANG_LEASES = 10  # a loop that stands still for so many lease times hangs
HANG_STATUS = 70


class LoopWatchdog:
    """Sees whether the event loop goes round. It counts its own rounds: a process that was stopped has not hung."""

    def __init__(self, limit_s: float, give_up: Callable[[float], None] | None = None) -> None:
        self._limit_s = limit_s
        self._give_up = give_up or end_process
        self._loop = asyncio.get_running_loop()
        self._ended = threading.Event()
        self._gone_round = True
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()

    def _watch(self) -> None:
        silent_s = 0.0
        while not self._ended.wait(ROUND_S):
            silent_s = 0.0 if self._gone_round else silent_s + ROUND_S
            if silent_s > self._limit_s:
                self._give_up(silent_s)
                return
            if self._gone_round:
                self._gone_round = False
                try:
                    self._loop.call_soon_threadsafe(self._note_round)
                except RuntimeError:  # the loop is closed: the process ends
                    return

    def _note_round(self) -> None:
        self._gone_round = True


def end_process(silent_s: float) -> None:
    """Ends the process at once. Its clients attach elsewhere, and a supervisor starts it again."""
    log.error("the event loop has hung for %.1f s: this router gives up", silent_s)
    os._exit(HANG_STATUS)
