"""The dispatcher's loops end when the router stops."""

import asyncio

from router.placing.dispatcher import Dispatcher


async def test_a_wake_up_at_the_same_moment_does_not_lose_the_cancellation():
    """In Python 3.11 asyncio.wait_for returns the result of what has just ended instead of being cancelled."""
    dispatcher = Dispatcher.__new__(Dispatcher)
    dispatcher._wake = asyncio.Event()
    popping = asyncio.create_task(dispatcher._pop_queue())
    for _ in range(3):
        await asyncio.sleep(0)  # the task waits for the event now
    dispatcher._wake.set()
    popping.cancel()
    done, _ = await asyncio.wait({popping}, timeout=5)
    assert done
    assert popping.cancelled()
