"""What comes while sessions send waits for the next wave; nothing waits for a client that does not read."""

import asyncio
import random

import pytest
from effort import patience

from router.streaming import session_waves
from router.streaming.session_waves import MAX_WOKEN, SessionWaves


class FakeSession:
    """Sends when a wave begins, and is done when the test says so."""

    def __init__(self, waves: SessionWaves, *, is_idle: bool = True) -> None:
        self.num_waves = 0
        self.woken = asyncio.Event()
        self.is_idle = is_idle
        self._waves = waves

    def begin_wave(self) -> bool:
        self.num_waves += 1
        self.woken.set()
        return self.is_idle

    def join(self) -> None:
        self._waves.join(self)

    def leave(self) -> None:
        self._waves.leave(self)


@pytest.fixture(autouse=True)
def _no_limit(monkeypatch):
    monkeypatch.setattr(session_waves, "WAVE_S", 60.0)


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_comes_while_a_wave_is_under_way_waits_for_its_last_session():
    waves = SessionWaves()
    one, two, late = (FakeSession(waves) for _ in range(3))
    one.join()
    two.join()
    await turns()
    for session in (one, late, one):
        session.join()
    one.leave()
    await turns()
    assert [each.num_waves for each in (one, two, late)] == [1, 1, 0]
    two.leave()
    await turns()
    assert [each.num_waves for each in (one, two, late)] == [2, 1, 1]


async def test_a_wave_does_not_wait_for_a_session_that_is_at_work_already():
    """Its client has not taken what was sent before."""
    waves = SessionWaves()
    stuck, other = FakeSession(waves, is_idle=False), FakeSession(waves)
    for expected in (1, 2):
        stuck.join()
        other.join()
        await turns()
        assert (stuck.num_waves, other.num_waves) == (expected, expected)
        other.leave()
    stuck.join()
    await turns()
    assert stuck.num_waves == 3


async def test_a_wave_ends_without_a_session_that_takes_too_long(monkeypatch):
    monkeypatch.setattr(session_waves, "WAVE_S", 0.01)
    waves = SessionWaves()
    stuck, other = FakeSession(waves), FakeSession(waves)
    stuck.join()
    await turns()
    other.join()
    await turns()
    assert other.num_waves == 0
    await asyncio.wait_for(other.woken.wait(), patience(10))


async def test_a_large_wave_lets_others_run_in_between_and_holds_all():
    waves = SessionWaves()
    sessions = [FakeSession(waves) for _ in range(3 * MAX_WOKEN + 1)]
    for session in sessions:
        session.join()
    counts = []
    for _ in range(6):
        await asyncio.sleep(0)
        counts.append(sum(session.num_waves for session in sessions))
        for session in sessions[:MAX_WOKEN]:
            session.leave()  # the first ones are done before the last ones are woken
    assert max(b - a for a, b in zip([0, *counts], counts, strict=False)) == MAX_WOKEN
    assert counts[-1] == len(sessions)


@pytest.mark.parametrize("seed", range(20))
async def test_whoever_joins_is_woken_after_it(seed):
    """Sessions join, send for as long as they like, and leave, in any order."""
    draw, waves = random.Random(seed), SessionWaves()
    sessions = [FakeSession(waves, is_idle=draw.random() < 0.8) for _ in range(50)]
    owed: dict[FakeSession, int] = {}
    for _ in range(400):
        session = draw.choice(sessions)
        if draw.random() < 0.5:
            session.join()
            owed[session] = session.num_waves + 1
        elif draw.random() < 0.9:
            session.leave()
        else:
            await asyncio.sleep(0)
    for _ in range(200):
        await asyncio.sleep(0)
        for session in sessions:
            session.leave()
    assert all(session.num_waves >= expected for session, expected in owed.items())
    assert not (waves._waiting or waves._sending or waves._unwoken)
