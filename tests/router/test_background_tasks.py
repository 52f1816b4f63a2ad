"""Loops that outlive their errors."""

import asyncio

from octavo.request.errors import StoreUnavailable
from router import background_tasks


async def test_no_error_ends_a_loop(monkeypatch):
    monkeypatch.setattr(background_tasks, "PAUSE_S", 0.001)
    rounds = []

    async def once() -> None:
        rounds.append(1)
        await asyncio.sleep(0)
        raise [StoreUnavailable("down"), ValueError("a defect")][len(rounds) % 2]

    task = asyncio.create_task(background_tasks.repeat_forever("test", once))
    try:
        async with asyncio.timeout(5):
            while len(rounds) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    finally:
        task.cancel()
