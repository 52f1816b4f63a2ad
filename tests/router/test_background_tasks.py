"""Loops that outlive their errors, and tasks that end although a cancellation was lost."""

import asyncio

from octavo.errors import StoreUnavailable
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


async def test_tasks_end_although_a_cancellation_is_lost(monkeypatch):
    monkeypatch.setattr(background_tasks, "CANCEL_AGAIN_S", 0.01)
    lost = []

    async def lose_one() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            lost.append(1)
        await asyncio.sleep(60)

    tasks = [asyncio.create_task(lose_one()) for _ in range(2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await background_tasks.end_tasks(tasks)
    assert len(lost) == 2
    assert all(task.cancelled() for task in tasks)
