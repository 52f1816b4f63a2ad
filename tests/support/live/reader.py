"""A client's stream that is read all the time, and what has come of it."""

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise

from octavo.client import Event, FinishReason
from octavo.request.sampling import TokenScore


class Reader:
    """Reads a stream in a task of its own."""

    def __init__(self, stream: AsyncIterator[Event]) -> None:
        self.stream = stream
        self.tokens: dict[int, list[int]] = {}
        self.scores: dict[int, list[TokenScore]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.arrivals: list[float] = []  # when each event came, by the monotonic clock
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.stream:
            self.arrivals.append(time.monotonic())
            self.tokens.setdefault(event.branch, []).extend(event.token_ids)
            self.scores.setdefault(event.branch, []).extend(event.logprobs)
            if event.finish_reason:
                self.finish[event.branch] = event.finish_reason

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two events."""
        return max(b - a for a, b in pairwise(self.arrivals))

    async def until(self, num_tokens: int, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while self.num_tokens < num_tokens and not self.task.done():  # noqa: ASYNC110  another task reads
                await asyncio.sleep(0.01)
        if self.num_tokens < num_tokens:
            await self.task  # it may have failed
            raise AssertionError(f"the stream has ended with {self.num_tokens} tokens")
