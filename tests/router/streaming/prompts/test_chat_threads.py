"""Chats that take long hold up nobody but those of the same model and size."""

import asyncio
import threading

import pytest

from octavo.request.errors import TooManyStreams
from router.streaming.prompts import chat_threads
from router.streaming.prompts.chat_threads import LARGE, MAX_BEHIND_SLOW, ChatThreads


async def test_long_chats_hold_up_only_their_own_kind():
    threads, release = ChatThreads(), threading.Event()
    held = [asyncio.create_task(threads.run("a", size, release.wait)) for size in [LARGE + 1] * 9]
    try:
        await asyncio.sleep(0)
        assert await threads.run("a", LARGE, lambda: 1) == 1
        assert await threads.run("b", LARGE + 1, lambda: 2) == 2
        assert not any(task.done() for task in held)
    finally:
        release.set()
    assert await asyncio.gather(*held) == [True] * 9


async def test_few_chats_wait_behind_slow_ones(monkeypatch):
    """As many as like wait behind chats that take no time."""
    threads, release = ChatThreads(), threading.Event()
    monkeypatch.setattr(chat_threads, "SLOW_S", 60.0)
    waiting = [asyncio.create_task(threads.run("a", 1, release.wait)) for _ in range(2 * MAX_BEHIND_SLOW)]
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*waiting)
    monkeypatch.setattr(chat_threads, "SLOW_S", -1.0)
    assert await threads.run("a", 1, lambda: 1) == 1
    release.clear()
    waiting = [asyncio.create_task(threads.run("a", 1, release.wait)) for _ in range(MAX_BEHIND_SLOW)]
    try:
        await asyncio.sleep(0)
        with pytest.raises(TooManyStreams, match="retry"):
            await threads.run("a", 1, lambda: 1)
        assert await threads.run("b", 1, lambda: 1) == 1
        monkeypatch.setattr(chat_threads, "SLOW_S", 60.0)
    finally:
        release.set()
    await asyncio.gather(*waiting)
    assert await threads.run("a", 1, lambda: 1) == 1
