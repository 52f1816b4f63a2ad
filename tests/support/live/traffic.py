"""Traffic: clients that have one stream after the other, each of which must say what an undisturbed run says."""

import asyncio
import random
import time
from collections.abc import Callable

from constraints import any_constraint
from effort import patience
from live.history import History
from live.oracle import Expected, Oracle, text_of

from octavo.client import AsyncClient, SamplingParams
from octavo.client.aio import AsyncStream
from octavo.request.ids import new_request_id

Draw = Callable[[int], tuple[list[int], SamplingParams, list[Expected]]]


class Traffic:
    """`begin` starts loops, each of which has one stream after the other until `stop`.

    `draw` makes the next request of a loop, by the loop's number. A wrong token is an error, and so is a stream that
    takes longer than `stream_s`, or longer still on a machine that is busy.
    """

    def __init__(self, client: AsyncClient, draw: Draw, stream_s: float = 60.0) -> None:
        self.client, self.draw = client, draw
        self.running: set[str] = set()  # requests
        self.num_streams = self.num_reattaches = 0
        self._stream_s, self._stopping = stream_s, False
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, num_loops: int) -> None:
        self._tasks = [asyncio.create_task(self._loop(number)) for number in range(num_loops)]

    async def ended(self, name: str, params: SamplingParams, history: History) -> None:
        """A stream has ended well."""

    def check(self) -> None:
        """Raises what has gone wrong so far."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def until(self, more: int, timeout_s: float = 90.0) -> None:
        """Until so many more streams have ended well."""
        begun = self.num_streams
        async with asyncio.timeout(timeout_s):
            while self.num_streams < begun + more:
                self.check()
                await asyncio.sleep(0.05)

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
            prompt, params, expected = self.draw(number)
            name = new_request_id()
            stream = self.client.generate(prompt, params, request_id=name)
            self.running.add(name)
            history = await read_history(stream, self._stream_s)
            self.running.discard(name)
            history.check(expected)
            self.num_streams += 1
            self.num_reattaches += stream.num_reattaches
            await self.ended(name, params, history)


async def read_history(stream: AsyncStream, timeout_s: float) -> History:
    """Reads a stream to its end. One that takes longer is an AssertionError that says how far it got."""
    history = History(times=[time.monotonic()])
    try:
        async with asyncio.timeout(patience(timeout_s)), stream:
            async for event in stream:
                history.times.append(time.monotonic())
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
