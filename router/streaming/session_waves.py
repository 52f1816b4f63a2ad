"""Sessions send their events together, in waves, so that the items that arrive during a wave are joined.

A busy router spends its time on messages, however many tokens they carry. While the sessions of a wave encode and send,
workers' items wait, and those of a branch become one. So a router has fewer messages to send the more it falls behind,
and each session has one at most in each wave. A router that is not busy sends everything as it comes.
"""

import asyncio
from collections import deque
from typing import Protocol

# A client that does not read holds its session up, and the wave no longer than this: about three times what sending
# takes.
WAVE_S = 0.001
WAVE_PER_SESSION_S = 0.0002
MAX_WOKEN = 32  # sessions that are woken together, so that a first token need not wait for a whole wave


class WavingSession(Protocol):
    """What a session lets its waves do."""

    def begin_wave(self) -> bool:
        """Tells the session that it may send its events. Returns whether it begins at once: it may still be busy."""
        ...


class SessionWaves:
    """Tells sessions that have items when to send them. Lives on the event loop.

    A wave ends when each of its sessions has left it: it has sent what it had, and the client's connection has taken
    it. A wave does not wait for a session that takes too long.
    """

    def __init__(self) -> None:
        self._waiting: dict[WavingSession, None] = {}  # for the next wave
        self._unwoken: deque[WavingSession] = deque()  # of this wave
        self._sending: set[WavingSession] = set()
        self._is_under_way = False
        self._limit: asyncio.TimerHandle | None = None

    def join(self, session: WavingSession) -> None:
        """The session has something to send. It may join more than once."""
        self._waiting[session] = None
        if not self._is_under_way:
            self._is_under_way = True
            asyncio.get_running_loop().call_soon(self._begin)  # with all that join meanwhile

    def leave(self, session: WavingSession) -> None:
        """Takes a session out of the wave: it has sent its events, or has ended."""
        if session in self._sending:
            self._sending.discard(session)
            if not (self._sending or self._unwoken):
                self._begin()

    def _begin(self) -> None:
        """Begins the next wave, without the sessions that are still sending from the last one."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        self._sending.clear()
        self._unwoken.extend(self._waiting)
        self._waiting.clear()
        self._wake_some()

    def _wake_some(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(min(MAX_WOKEN, len(self._unwoken))):
            session = self._unwoken.popleft()
            if session.begin_wave():
                self._sending.add(session)
        if self._unwoken:
            loop.call_soon(self._wake_some)
        elif self._sending:
            self._limit = loop.call_later(WAVE_S + WAVE_PER_SESSION_S * len(self._sending), self._begin)
        elif self._waiting:
            self._begin()
        else:
            self._is_under_way = False
