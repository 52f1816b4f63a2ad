"""A loop that hangs is noticed, and one that is only busy is not."""

import asyncio
import subprocess
import sys
import time

import pytest
from waiting import until

from router import loop_watchdog
from router.loop_watchdog import HANG_STATUS, LoopWatchdog


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(loop_watchdog, "ROUND_S", 0.02)


async def test_a_loop_that_hangs_is_given_up():
    given_up = []
    with LoopWatchdog(0.2, given_up.append):
        await asyncio.sleep(0.1)
        assert not given_up
        while not given_up:
            time.sleep(0.01)  # noqa: ASYNC251  this is the hang
    assert given_up[0] > 0.2


def test_the_process_ends():
    program = """
import asyncio, time
from router import loop_watchdog
loop_watchdog.ROUND_S = 0.02
async def main():
    with loop_watchdog.LoopWatchdog(0.1):
        time.sleep(60)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == HANG_STATUS
    assert "this router gives up" in done.stderr


async def test_a_loop_that_goes_round_is_left_alone():
    given_up = []
    with LoopWatchdog(5.0, given_up.append) as watchdog:
        for _ in range(20):
            await asyncio.sleep(0.01)
            time.sleep(0.02)  # noqa: ASYNC251  busy
    await until(lambda: not watchdog._thread.is_alive())
    assert not given_up
