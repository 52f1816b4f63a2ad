"""How a program begins, and is asked to end."""

import asyncio
import gc
import signal

import pytest

from octavo.process import loop
from octavo.process.loop import stop_request


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


async def test_what_is_shared_goes_on_without_its_caller():
    reported, goes_on = [], asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    async def fail() -> None:
        await goes_on.wait()
        raise ValueError("too late")

    work = asyncio.create_task(fail())
    callers = [asyncio.create_task(loop.shared(work)) for _ in range(2)]
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.wait(callers[:1])
    assert callers[0].cancelled()
    assert not work.done()
    goes_on.set()
    with pytest.raises(ValueError, match="too late"):
        await callers[1]
    lonely = asyncio.create_task(loop.shared(asyncio.create_task(fail())))
    await asyncio.sleep(0)
    lonely.cancel()
    await asyncio.wait({lonely})
    await asyncio.sleep(0.01)
    gc.collect()
    assert not reported
