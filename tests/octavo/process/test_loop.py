"""How a program begins, and is asked to end."""

import asyncio
import gc
import signal

import pytest

from octavo.process import loop
from octavo.process.loop import Stopped, before, stop_request


async def test_a_process_asked_to_end_does_not_wait_for_what_it_began():
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, stop.set)
    with pytest.raises(Stopped):
        await before(stop, asyncio.sleep(100))
    assert await before(asyncio.Event(), asyncio.sleep(0, "done")) == "done"


@pytest.mark.parametrize(
    ("names", "urgent"),
    [
        ([signal.SIGTERM], False),
        ([signal.SIGINT], True),
        ([signal.SIGTERM, signal.SIGTERM], True),
        ([signal.SIGTERM, signal.SIGINT], True),
    ],
)
async def test_a_signal_asks_to_end_and_a_second_one_to_end_at_once(names, urgent):
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


async def test_tasks_end_although_a_cancellation_is_lost(monkeypatch):
    monkeypatch.setattr(loop, "CANCEL_AGAIN_S", 0.01)
    lost = []

    async def lose_one() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            lost.append(1)
        await asyncio.sleep(60)

    tasks = [asyncio.create_task(lose_one()) for _ in range(2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await loop.end_tasks(tasks)
    assert len(lost) == 2
    assert all(task.cancelled() for task in tasks)


async def test_an_error_that_nobody_waits_for_is_not_logged():
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    async def fail() -> None:
        raise ValueError("nobody waits")

    for wrap, num_reported in ((loop.unlogged, 0), (lambda task: task, 1)):
        await asyncio.wait({wrap(asyncio.create_task(fail()))})
        gc.collect()
        assert len(reported) == num_reported
    task = loop.unlogged(asyncio.create_task(fail()))
    with pytest.raises(ValueError, match="nobody waits"):
        await task


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


async def test_what_is_shared_and_cancelled_ends_its_callers():
    work = asyncio.create_task(asyncio.sleep(60))
    caller = asyncio.create_task(loop.shared(work))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
