"""In the end the store knows to which sequences a router is attached, whatever ended a call and whatever was lost."""

import asyncio
from types import SimpleNamespace

import pytest
from waiting import until

from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation, SequenceId
from router import attachment_outbox
from router.attachment_outbox import AttachmentOutbox
from router.session_registry import SessionRegistry

A, ROUTER = SequenceId("a"), Incarnation("router")


class FakeStore:
    """A store that knows which sequences are attached, and that can be down or silent."""

    def __init__(self):
        self.attached, self.calls, self.down, self.answering = set(), [], False, asyncio.Event()
        self.answering.set()

    async def attach(self, seq_id, router):
        await self._enter("attach")
        self.attached.add(seq_id)
        await self.answering.wait()
        return True

    async def detach(self, seq_id, router):
        await self._enter("detach")
        self.attached.discard(seq_id)
        await self.answering.wait()

    async def _enter(self, name):
        self.calls.append(name)
        await asyncio.sleep(0)
        if self.down:
            raise StoreUnavailable("down")


class Parts:
    def __init__(self):
        self.store, self.sessions = FakeStore(), SessionRegistry()
        self.outbox = AttachmentOutbox(self.store, ROUTER, self.sessions)

    def come_back(self):
        """A client is here."""
        self.sessions.add(SimpleNamespace(seq_id=A))

    def attach(self):
        """A call that opens a session once the store has answered."""

        async def attach():
            await self.outbox.attach_by(A, self.store.attach(A, ROUTER))
            self.come_back()

        return asyncio.create_task(attach())

    async def told(self):
        await until(lambda: not len(self.outbox))


@pytest.fixture
async def parts(monkeypatch):
    monkeypatch.setattr(attachment_outbox, "RETRY_S", 0.01)
    monkeypatch.setattr(attachment_outbox, "MAX_RETRY_S", 0.02)
    monkeypatch.setattr(attachment_outbox, "LATE_S", 0.3)
    made = Parts()
    loop = asyncio.create_task(made.outbox.keep_telling())
    yield made
    loop.cancel()
    await made.outbox.close()


async def test_a_caller_that_leaves_early_is_detached(parts):
    parts.store.answering.clear()
    call = parts.attach()
    await until(lambda: parts.store.attached)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert parts.store.attached == {A}
    parts.store.answering.set()
    await until(lambda: not parts.store.attached)


async def test_a_call_done_late_is_undone(parts):
    """An accept that timed out may be in the store's socket, and be done after the detach that followed it."""
    parts.store.down = True
    with pytest.raises(StoreUnavailable):
        await parts.attach()
    parts.store.down = False
    await until(lambda: "detach" in parts.store.calls)
    parts.store.attached = {A}
    await until(lambda: not parts.store.attached)
    await parts.told()


async def test_a_late_detach_spares_a_returned_client(parts):
    parts.store.down = True
    parts.outbox.add(A)
    await until(lambda: "detach" in parts.store.calls)
    parts.come_back()
    parts.store.down = False
    await until(lambda: parts.store.attached)
    parts.store.attached = set()  # the detach that was not answered is done now
    await until(lambda: parts.store.attached)
    await parts.told()
    assert parts.store.attached == {A}


async def test_a_client_back_during_its_detach_stays_attached(parts):
    parts.store.attached = {A}
    parts.store.answering.clear()
    parts.outbox.add(A)
    await until(lambda: parts.store.calls)
    parts.come_back()
    parts.store.answering.set()
    await until(lambda: parts.store.calls[-1] == "attach" and not len(parts.outbox))
    await until(lambda: parts.store.attached == {A})


async def test_nothing_is_told_during_an_attach(parts):
    parts.store.answering.clear()
    call = parts.attach()
    await until(lambda: parts.store.attached)
    parts.outbox.add(A)
    await asyncio.sleep(0.05)
    assert "detach" not in parts.store.calls
    parts.store.answering.set()
    await call
    await parts.told()
    assert "detach" not in parts.store.calls


async def test_a_lost_detach_is_told_again(parts, monkeypatch):
    """A promoted replica may lack it. Nobody else would detach this router, which lives."""
    parts.store.attached = {A}
    parts.outbox.add(A)
    await until(lambda: not parts.store.attached)
    parts.store.attached = {A}
    parts.outbox.tell_again()
    await until(lambda: not parts.store.attached)
    await parts.told()
    monkeypatch.setattr(attachment_outbox, "LAG_S", 0.0)
    parts.outbox.tell_again()
    assert len(parts.outbox) == 0


async def test_a_grace_is_renewed_once_the_store_answers(parts):
    """A client that is here stays attached, also where another one of its request was refused."""
    parts.store.down = True
    parts.outbox.renew_grace(A)
    await until(lambda: parts.store.calls)
    parts.store.down = False
    await until(lambda: parts.store.calls[-2:] == ["attach", "detach"])
    await parts.told()
    assert not parts.store.attached
    await parts.attach()
    parts.outbox.renew_grace(A)
    await parts.told()
    assert (parts.store.attached, parts.store.calls[-2:]) == ({A}, ["attach", "attach"])
