"""Bodies as they arrive: a slow one keeps no place from others."""

import asyncio

import pytest

from octavo.request.errors import DeadlineExceeded
from router.http.bodies import json_body
from router.http.bodies.json_body import MAX_BODY_BYTES, SMALL_BODY_BYTES, BodyReader

SCOPE = {"headers": []}


class Sender:
    """What a client sends, part by part."""

    def __init__(self):
        self.parts = asyncio.Queue()

    async def receive(self):
        body, more = await self.parts.get()
        return {"type": "http.request", "body": body, "more_body": more}

    def send(self, body, more=True):
        self.parts.put_nowait((body, more))


async def test_the_slowest_of_many_large_bodies_is_displaced():
    reader, senders = BodyReader(max_large=2), [Sender() for _ in range(3)]
    reading = [asyncio.create_task(reader.read(SCOPE, sender.receive)) for sender in senders]
    for number, sender in enumerate(senders):
        sender.send(b"x" * (SMALL_BODY_BYTES + 1) * (3 if number else 1))
        await asyncio.sleep(0.01)
    with pytest.raises(DeadlineExceeded, match="too slowly"):
        await asyncio.wait_for(reading[0], 20)
    for sender in senders[1:]:
        sender.send(b"y", more=False)
    assert [body[-1:] for body in await asyncio.gather(*reading[1:])] == [b"y", b"y"]


async def test_a_body_with_room_of_its_own_has_the_time_that_it_has_earned(monkeypatch):
    monkeypatch.setattr(json_body, "BODY_S", 0.2)
    monkeypatch.setattr(json_body, "LEAST_RATE", 10)
    reader, silent, quick = BodyReader(), Sender(), Sender()
    quick.send(b"x" * 1000)
    reading = asyncio.create_task(reader.read(SCOPE, quick.receive, MAX_BODY_BYTES + 1))
    with pytest.raises(DeadlineExceeded, match="too slowly"):
        await asyncio.wait_for(reader.read(SCOPE, silent.receive, MAX_BODY_BYTES + 1), 20)
    quick.send(b"y", more=False)
    assert (await asyncio.wait_for(reading, 20))[-1:] == b"y"


async def test_small_bodies_wait_for_no_large_one():
    reader, slow = BodyReader(max_large=1), [Sender() for _ in range(50)]
    reading = [asyncio.create_task(reader.read(SCOPE, sender.receive)) for sender in slow]
    for sender in slow:
        sender.send(b"{")
    sender = Sender()
    sender.send(b"{", more=True)
    sender.send(b"}", more=False)
    assert await asyncio.wait_for(reader.read(SCOPE, sender.receive), 20) == b"{}"
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
