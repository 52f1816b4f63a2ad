"""How a program begins, and is asked to end."""

import asyncio
import signal

import pytest

from octavo.loop import Stopped, before, stop_event


async def test_a_process_asked_to_end_does_not_wait_for_what_it_began():
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, stop.set)
    with pytest.raises(Stopped):
        await before(stop, asyncio.sleep(100))
    assert await before(asyncio.Event(), asyncio.sleep(0, "done")) == "done"


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_asks_to_end(name):
    stop = stop_event()
    signal.raise_signal(name)
    async with asyncio.timeout(5):
        await stop.wait()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
