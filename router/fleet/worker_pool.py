"""All workers of this router: found through the store, linked, parted with when they are gone."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from octavo.errors import StoreUnavailable
from octavo.ids import Incarnation
from octavo.store.base import Store
from octavo.store.calls import Member
from router.fleet.kv_index import KvIndex
from router.fleet.model_registry import ModelRegistry, ServedModel
from router.fleet.worker_link import WorkerLink
from router.fleet.worker_view import WorkerView
from router.session_registry import SessionRegistry

log = logging.getLogger(__name__)

DISCOVER_S = 0.5
REMEMBER_LOST_S = 15.0  # a process that was taken for dead, and still renews its lease then, is met anew


class WorkerPool:
    """All links, kept in step with the store's members."""

    def __init__(
        self,
        store: Store,
        router_id: Incarnation,
        sessions: SessionRegistry,
        models: ModelRegistry,
        on_lost: Callable[[Incarnation], Awaitable[None]],
        on_report: Callable[[], None],
    ) -> None:
        self.index = KvIndex()
        self.links: dict[Incarnation, WorkerLink] = {}
        self._store = store
        self._router_id = router_id
        self._sessions = sessions
        self._models = models
        self._on_lost = on_lost
        self._on_report = on_report
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}
        self._lost: dict[Incarnation, float] = {}  # and when

    async def discover(self) -> None:
        """One look at who has a lease; the router does this for as long as it lives."""
        try:
            members = await self._store.members("worker")
        except StoreUnavailable:
            members = None
        if members is not None:
            await self._part_with_gone({member.id for member in members})
            self._meet_new(members)
        await asyncio.sleep(DISCOVER_S)

    def find(self, incarnation: Incarnation) -> WorkerLink | None:
        return self.links.get(incarnation)

    def lost(self, incarnation: Incarnation) -> bool:
        """Whether this router has seen that process die."""
        return incarnation in self._lost

    def views(self, model: ServedModel) -> list[WorkerView]:
        """The same weights may be served under two names, with another layout each."""
        same = (model.fingerprint, model.layout)
        met = [(link, link.facts) for link in self.links.values() if link.facts]
        return [link.view() for link, facts in met if (facts.fingerprint, facts.layout) == same]

    async def close(self) -> None:
        for incarnation in list(self.links):
            await self._part(incarnation)

    def _meet_new(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.id in self.links or member.id in self._lost:
                continue
            try:
                link = WorkerLink(member, self._router_id, self._sessions, self._models, self.index, self._on_report)
            except (KeyError, TypeError, ValueError) as error:
                log.error("worker %s describes itself in a way that this router cannot read: %r", member.id, error)
                continue
            log.info("met worker %s at %s (%s)", link.worker_id, link.endpoint, link.incarnation)
            self.links[member.id] = link
            self._tasks[member.id] = asyncio.create_task(link.run(self._broken))

    async def _part_with_gone(self, present: set[Incarnation]) -> None:
        for link in self.links.values():
            link.has_lease = link.incarnation in present
        forgotten = [id for id, when in self._lost.items() if time.monotonic() - when > REMEMBER_LOST_S]
        for incarnation in forgotten:
            del self._lost[incarnation]
        gone = [id for id, link in self.links.items() if id not in present and not link.steps.connected]
        for incarnation in {*gone, *(id for id in forgotten if id in self.links)}:
            await self._part(incarnation)

    async def _broken(self, link: WorkerLink) -> None:
        """A stream of it broke: whether the worker is lost, one probe tells."""
        if await link.probe() is False:
            log.warning("worker %s (%s) is lost", link.worker_id, link.incarnation)
            link.give_up()
            self._lost[link.incarnation] = time.monotonic()
            await self._on_lost(link.incarnation)
            self._sessions.check_owned(link.incarnation)

    async def _part(self, incarnation: Incarnation) -> None:
        task = self._tasks.pop(incarnation, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.links.pop(incarnation).close()
