"""Clients that have one stream after the other: what traffic of every kind is, and how its loops begin and end."""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable

from constraints import any_constraint
from live.history import History
from live.oracle import Oracle, text_of

from octavo.client import AsyncClient, Event, SamplingParams
from octavo.client.aio import AsyncStream


class ClientLoops(ABC):
    """`begin` starts loops, each of which runs `stream_once` again and again until `stop`."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, num_loops: int) -> None:
        self._tasks = [asyncio.create_task(self._loop(number)) for number in range(num_loops)]

    @abstractmethod
    async def stream_once(self, number: int) -> None:
        """One stream of a loop, from its beginning to its end. What it raises, `check` and `stop` raise."""

    def check(self) -> None:
        """Raises what has gone wrong so far."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """Lets what runs come to its end."""
        self._stopping = True
        try:
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.client.close()

    async def _loop(self, number: int) -> None:
        while not self._stopping:
            await self.stream_once(number)


async def read_history(
    stream: AsyncStream, timeout_s: float, on_event: Callable[[Event], None] = lambda _: None
) -> History:
    """Reads a stream to its end. One that takes longer is an AssertionError that says how far it got."""
    history = History()
    try:
        async with asyncio.timeout(timeout_s), stream:
            async for event in stream:
                on_event(event)
                history.add(event)
    except TimeoutError:
        raise AssertionError(f"{stream.request_id} got no further than {history} in time") from None
    return history


def varied_request(rng: random.Random, oracle: Oracle, kind: int, length: int) -> tuple[list[int], SamplingParams]:
    """Of eight kinds: best of three, two branches, a stop string, two with a seed, two greedy ones, and a form."""
    prompt = [rng.randrange(1, 1000) for _ in range(rng.choice([1, 15, 16, 17, 40, 200]))]
    seed = rng.randrange(2**63)
    match kind % 8:
        case 0:
            return prompt, SamplingParams(temperature=1.0, seed=seed, n=1, best_of=3, max_tokens=length // 2)
        case 1:
            return prompt, SamplingParams(temperature=0.7, seed=seed, n=2, max_tokens=length)
        case 2:
            text = text_of(oracle.tokens(prompt, length)[length // 2 :])
            stop = tuple(character for character in text if character.isascii())[:1]
            return prompt, SamplingParams(temperature=0.0, stop=stop, max_tokens=length)
        case 3 | 4:
            return prompt, SamplingParams(temperature=1.3, seed=seed, max_tokens=length)
        case 5:
            constraint = any_constraint(rng)
            return prompt, SamplingParams(temperature=1.0, seed=seed, n=2, constraint=constraint, max_tokens=length)
        case _:
            return prompt, SamplingParams(temperature=0.0, max_tokens=length)
