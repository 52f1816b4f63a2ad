"""A client's stream that is read all the time, and what has come of it."""

import asyncio
from collections.abc import AsyncIterator

from octavo.client import Event, FinishReason


class Reader:
    """Reads a stream in a task of its own."""

    def __init__(self, stream: AsyncIterator[Event]) -> None:
        self.stream = stream
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.stream:
            self.tokens.setdefault(event.branch, []).extend(event.token_ids)
            if event.finish_reason:
                self.finish[event.branch] = event.finish_reason

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    async def until(self, num_tokens: int, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while self.num_tokens < num_tokens and not self.task.done():  # noqa: ASYNC110  another task reads
                await asyncio.sleep(0.01)
        if self.num_tokens < num_tokens:
            await self.task  # it may have failed
            raise AssertionError(f"the stream has ended with {self.num_tokens} tokens")
