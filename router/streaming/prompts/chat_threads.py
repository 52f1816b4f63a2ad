"""Where prompts are made: small texts at once, large ones and chats in threads, so that no stream has to wait."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.request.errors import TooManyStreams

T = TypeVar("T")

LARGE = 8192  # characters or token ids: a tokenizer takes about as long for so many as a step does
NUM_THREADS = {False: 1, True: 2}  # of a model: for its small chats, and for its large ones
SLOW_S = 1.0  # no chat takes so long, unless it is very large or its template is made to take long
MAX_BEHIND_SLOW = 32  # chats that may wait where the last one was slow
Key = tuple[str, bool]  # the model's name, and whether the chat is large


async def run_aside(size: int, work: Callable[[], T]) -> T:
    """The result of `work`. Large work runs in a thread, so that no stream has to wait for it."""
    return await asyncio.to_thread(work) if size > LARGE else work()


class ChatThreads:
    """The threads in which chats become prompts, each waiting for a process that renders the model's chat template.

    A model's chats wait for no other model's, and small chats for no large ones: a template that takes long holds up
    nobody but those who ask for it.
    """

    def __init__(self) -> None:
        self._executors: dict[Key, ThreadPoolExecutor] = {}
        self._num_waiting: Counter[Key] = Counter()
        self._slow: set[Key] = set()

    async def run(self, model: str, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, for a chat of so many characters. Raises TooManyStreams."""
        key = model, size > LARGE
        if key in self._slow and self._num_waiting[key] >= MAX_BEHIND_SLOW:
            text = f"{MAX_BEHIND_SLOW} chats of {model} wait, whose template takes long: retry, or send text"
            raise TooManyStreams(text, retry_after_ms=1000)
        executor = self._executors.get(key)
        if executor is None:
            executor = self._executors[key] = ThreadPoolExecutor(NUM_THREADS[key[1]], f"chats of {model}")
        self._num_waiting[key] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, self._run_one, key, work)
        finally:
            self._num_waiting[key] -= 1

    def _run_one(self, key: Key, work: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return work()
        finally:
            if time.monotonic() - began > SLOW_S:
                self._slow.add(key)
            else:
                self._slow.discard(key)
