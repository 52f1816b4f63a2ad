"""How a router stays known to the store, and what it does where the store did not hear of it, or lost something."""

import asyncio
import time
from contextlib import suppress

from octavo.request.errors import StoreUnavailable
from octavo.store.base import Store
from octavo.store.calls import Member
from router.attachment_outbox import AttachmentOutbox
from router.session_registry import SessionRegistry
from router.streaming.resume_tokens import ResumeTokens

CUT_OFF_S = 20.0  # less than the time for which the store keeps the requests of a router that it does not hear of
GENERATION_INTERVAL_S = 0.1
RESUME_SECRET = "resume"


class RouterLease:
    """Lives on the router's event loop."""

    def __init__(
        self,
        store: Store,
        member: Member,
        lease_ms: int,
        sessions: SessionRegistry,
        attachments: AttachmentOutbox,
        resume_tokens: ResumeTokens,
        generation: int,
    ) -> None:
        """`generation`: that of the store that the router has prepared itself for."""
        self.member = member
        self._store = store
        self._lease_ms = lease_ms
        self._sessions = sessions
        self._attachments = attachments
        self._resume_tokens = resume_tokens
        self._generation = generation
        self._may_have_lapsed = False  # whether the last heartbeat was not answered
        self._renewed_at = time.monotonic()

    async def renew(self) -> None:
        """Renews the lease. If it had ended, a sweep may have detached the clients, and all are attached again."""
        self._may_have_lapsed, was_unanswered = True, self._may_have_lapsed  # the next reply says nothing of this call
        renewal = await self._store.heartbeat(self.member, self._lease_ms)
        self._may_have_lapsed, self._renewed_at = False, time.monotonic()
        if renewal.lapsed or was_unanswered:
            self._attachments.add_all(self._sessions.seq_ids())

    async def keep(self) -> None:
        """One renewal, with the pause before the next.

        A router that the store does not hear of for long ends its streams, while their requests still live.
        """
        try:
            await self.renew()
        except StoreUnavailable:
            if time.monotonic() - self._renewed_at > CUT_OFF_S:
                self._sessions.end_streams(
                    StoreUnavailable("the store does not answer: attach again, on any router", retry_after_ms=1000)
                )
            raise
        await asyncio.sleep(self._lease_ms / 3000)

    async def follow_generation(self) -> None:
        """A new generation of the store may have lost anything: the secret, attachments, and the ends of journals."""
        await asyncio.sleep(GENERATION_INTERVAL_S)
        generation = self._store.generation
        if generation != self._generation:
            self._resume_tokens.use_key(await self._store.secret(RESUME_SECRET), generation)
            self._attachments.tell_again()
            self._sessions.poll_records(self._sessions.seq_ids())
            self._generation = generation

    async def end(self, patience_s: float) -> None:
        with suppress(StoreUnavailable, TimeoutError):  # the lease ends by itself
            async with asyncio.timeout(patience_s):
                await self._store.leave(self.member)
