"""The dispatcher pops for the places that the workers have, keeps some for tenants, and ends when the router stops."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from octavo.request.ids import Incarnation
from router.background_tasks import BackgroundTasks
from router.fleet.worker_view import WorkerView
from router.placing.dispatcher import Dispatcher
from router.session_registry import SessionRegistry


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


class Place:
    """A dispatcher with a worker of 32 rows, two of which may be kept, and a store that answers pops as it is told."""

    def __init__(self) -> None:
        self.view = WorkerView(
            incarnation=Incarnation("a"), worker_id="a", available=True, reason_unavailable="", queued_tokens=0,
            num_running=0, num_waiting=0, dispatched_tokens=0, num_dispatched=0, num_free_blocks=1000,
            num_cached_blocks=0, num_blocks=1000, block_size=16, max_batch_sequences=32, context_tokens=8192,
        )  # fmt: skip
        link = SimpleNamespace(facts=SimpleNamespace(fingerprint="model"), view=lambda: self.view)
        self.pops: list[tuple[int, int, int]] = []  # the count, the places, and how many may be kept
        self.waiting = 0  # how many sequences the store gives
        self.held_back = 0  # how many of the places it keeps
        self.dispatcher = Dispatcher(
            self, Incarnation("router"), SimpleNamespace(links={"a": link}), self, SessionRegistry(),
            BackgroundTasks(), 0,
        )  # fmt: skip

    async def pop(self, model: str, count: int, claim_ms: int, places: int, most_kept: int) -> list[int]:
        self.pops.append((count, places, most_kept))
        given = min(count, self.waiting, max(0, places - min(self.held_back, most_kept)))
        self.waiting -= given
        self.view = replace(self.view, num_running=self.view.num_running + given)
        return [0] * given

    async def assign_popped(self, popped: int) -> None:
        pass

    async def report(self, num_running: int) -> list[tuple[int, int, int]]:
        """The worker runs so many sequences now; the pops that follow."""
        await asyncio.sleep(0)  # assignments have ended
        self.view = replace(self.view, num_running=num_running)
        self.dispatcher.note_room()
        return await self.popped()

    async def arrive(self) -> list[tuple[int, int, int]]:
        """A sequence may be in the queue; the pops that follow."""
        self.dispatcher.note_queued()
        return await self.popped()

    async def popped(self) -> list[tuple[int, int, int]]:
        self.pops.clear()
        if self.dispatcher._wake.is_set():
            await self.dispatcher._pop_queue()
        await asyncio.sleep(0)
        return list(self.pops)


@pytest.fixture
def place() -> Place:
    return Place()


async def test_a_pop_tells_how_many_places_are_left_and_how_many_may_be_kept(place):
    await place.report(29)
    assert await place.arrive() == [(3, 3, 2)]
    assert await place.report(10) == [], "nothing waited"


async def test_what_may_be_held_back_is_popped_when_there_are_more_places(place):
    place.waiting, place.held_back = 9, 2
    await place.report(29)
    assert await place.arrive() == [(3, 3, 2)]
    assert place.view.num_running == 30, "two places were kept"
    assert await place.report(30) == [], "a report without a new place costs no call"
    assert await place.report(29) == [(3, 3, 2)]
    assert await place.report(27) == [(5, 5, 2)]


async def test_a_newcomer_is_popped_at_once_though_others_are_held_back(place):
    place.waiting, place.held_back = 9, 2
    await place.report(29)
    await place.arrive()
    place.held_back = 0
    assert (await place.arrive())[0] == (2, 2, 2)


async def test_few_places_in_all_are_never_kept(place):
    place.view = replace(place.view, max_batch_sequences=15)
    assert await place.arrive() == [(3, 3, 0)]
