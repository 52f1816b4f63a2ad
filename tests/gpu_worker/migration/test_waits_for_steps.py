"""How often migrations wait for steps to end: this does not depend on how fast the machine is.

Each step waits until the test lets it go on, so whatever needs the end of a step cannot happen before that.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from waiting import until
from worker_pair import Follower, WorkerPair, greedy, worker_pair

PROMPT = tuple(range(1, 70))
PATIENCE_S = 30.0
LEASE_MS = 60_000  # longer than any step waits for its turn


class CallCount:
    """Counts the calls of a function that it takes the place of."""

    def __init__(self, owner: Any, name: str) -> None:
        self.num_calls = 0
        self._function: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        return self._function(*args)


class GatedPair:
    """Both workers have a step to run at any time, which waits for its turn, and four or eight sequences are on `a`."""

    def __init__(self, pair: WorkerPair) -> None:
        self.pair, self.a, self.b = pair, pair.a, pair.b
        # Each posts its command at once.
        self.freezes = CallCount(pair.a.worker.migrations._worker.blocks, "freeze_and_pin")
        self.followers: list[tuple[Follower, tuple[int, ...]]] = []

    async def begin(self, count: int) -> None:
        for number in range(count):
            prompt = tuple(number + token for token in PROMPT)
            self.followers.append((await self.pair.run(greedy(400), prompt=prompt), prompt))
        self.followers.append((await self.pair.run(greedy(400), prompt=PROMPT, on=self.b), PROMPT))
        for worker in (self.a, self.b):
            worker.runner.gated = True
        await until(lambda: self.a.runner.waits and self.b.runner.waits, PATIENCE_S)
        self.admissions = CallCount(self.b.worker.engine.port, "post")  # nothing else is posted there from here on
        self.a.runner.num_steps = self.b.runner.num_steps = 0

    @property
    def num_steps(self) -> tuple[int, int]:
        return self.a.runner.num_steps, self.b.runner.num_steps

    async def until_frozen(self, num_moves: int) -> None:
        """Lets the source end a step when so many sequences have asked for that, and the target when they are there."""
        await until(lambda: self.freezes.num_calls == num_moves, PATIENCE_S)
        self.a.runner.turns.release()
        await until(lambda: self.admissions.num_calls == num_moves, PATIENCE_S)

    async def check_ends(self) -> None:
        self.a.runner.gated = False
        self.b.runner.let_go()
        for follower, prompt in self.followers:
            await self.pair.check_end(follower, greedy(400), prompt=prompt)
        await self.a.has_let_go()
        await self.b.has_let_go()


async def test_four_migrations_wait_for_one_step_of_the_source_and_one_of_the_target():
    """All that is looked at, pinned, held, sent and made known happens while a step runs."""
    async with worker_pair(lease_ms=LEASE_MS) as pair:
        gated = GatedPair(pair)
        await gated.begin(4)
        moves = [asyncio.create_task(pair.a.migrate(follower.seq_id)) for follower, _ in gated.followers[:4]]
        await until(lambda: gated.freezes.num_calls == 4, PATIENCE_S)
        assert gated.num_steps == (0, 0)
        assert not pair.a.worker.workload.frozen
        assert pair.b.worker.workload.tables.device.num_reserved > 4 * (len(PROMPT) // 4)
        await gated.until_frozen(4)
        assert gated.num_steps == (1, 0)
        assert not any(move.done() for move in moves)
        pair.b.runner.turns.release()
        for answers in await asyncio.gather(*moves):
            assert answers[-1].epoch == 2
        assert gated.num_steps == (1, 1)
        await gated.check_ends()


async def test_a_drain_begins_the_next_moves_without_waiting_for_a_step():
    """Eight sequences, four at once: two steps of each worker in all."""
    async with worker_pair(lease_ms=LEASE_MS) as pair:
        gated = GatedPair(pair)
        await gated.begin(8)
        drain = pair.a.worker.drain
        drain.begin(PATIENCE_S)
        for num_moves in (4, 8):
            await gated.until_frozen(num_moves)
            pair.b.runner.turns.release()
        async with asyncio.timeout(PATIENCE_S):
            await drain.wait_until_done()
        assert (drain.num_migrated, drain.num_released) == (8, 0)
        assert gated.num_steps == (2, 2)
        await gated.check_ends()
