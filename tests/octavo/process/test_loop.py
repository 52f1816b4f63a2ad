"""How a program begins, and is asked to end."""

import asyncio
import signal

import pytest

from octavo.process.loop import Stopped, before, stop_request


@pytest.mark.parametrize(("names", "urgent"), [("TERM", False), ("INT", True), ("TERM TERM", True), ("TERM INT", True)])
async def test_a_second_signal_ends_at_once(names, urgent):
    request = stop_request()
    async with asyncio.timeout(5):
        for name in names.split():
            signal.raise_signal(signal.Signals[f"SIG{name}"])
            await request.asked.wait()
            await asyncio.sleep(0.01)
        if urgent:
            await request.urgent.wait()
    assert request.urgent.is_set() == urgent
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


async def test_an_ending_process_waits_for_nothing():
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, stop.set)
    with pytest.raises(Stopped):
        await before(stop, asyncio.sleep(100))
    assert await before(asyncio.Event(), asyncio.sleep(0, "done")) == "done"
