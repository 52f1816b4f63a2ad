"""How a program begins, and is asked to end."""

import asyncio
import signal

import pytest

from octavo.process.loop import Stopped, before, stop_request


@pytest.mark.parametrize(
    ("names", "urgent"),
    [
        ([signal.SIGTERM], False),
        ([signal.SIGINT], True),
        ([signal.SIGTERM, signal.SIGTERM], True),
        ([signal.SIGTERM, signal.SIGINT], True),
    ],
)
async def test_a_second_signal_ends_at_once(names, urgent):
    request = stop_request()
    for name in names:
        signal.raise_signal(name)
        async with asyncio.timeout(5):
            await request.asked.wait()
        await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        if urgent:
            await request.urgent.wait()
    assert request.urgent.is_set() == urgent
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)


async def test_an_ending_process_waits_for_nothing():
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, stop.set)
    with pytest.raises(Stopped):
        await before(stop, asyncio.sleep(100))
    assert await before(asyncio.Event(), asyncio.sleep(0, "done")) == "done"
