"""All workers of this router: found in the store, linked, and removed when they are gone."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from octavo.pictures.picture import parse_pictures, shown
from octavo.process.loop import end_tasks
from octavo.request import hashing
from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation, SequenceId
from octavo.store.base import Store
from octavo.store.calls import Member, WorkerLimits
from octavo.wire.tls import TlsFiles
from router.fleet.kv_index import HitCounts, KvIndex
from router.fleet.model_registry import ModelRegistry, ServedModel
from router.fleet.worker_link import ProbeResult, WorkerLink
from router.fleet.worker_view import WorkerSnapshot, WorkerView
from router.session_registry import SessionRegistry

log = logging.getLogger(__name__)

DISCOVER_S = 0.5
MAX_NAMES = 1024
REMEMBER_LOST_S = 15.0  # how long a lost worker is remembered at most
QUIET_S = 60.0  # a worker that was lost longer ago than this is lost for the first time again


@dataclass(slots=True)
class WorkerLoss:
    """A loss of a worker: this router found its process dead, or thought so."""

    lost_at: float
    pause_s: float  # how long the worker is not tried again where it keeps its lease
    lapsed: bool = False  # the store has said since then that the worker has no lease
    is_over: bool = False  # the worker is tried again


class LostWorkers:
    """A router loses a worker when their connection breaks and a probe finds nobody. The worker may live all the same.

    The store shows that it does: a lease runs again that had ended, or runs longer than it can without a renewal. The
    worker is tried again then. Where its lease has never ended, perhaps it is only this router that does not reach it:
    the next loss within QUIET_S lasts twice as long as the one before.
    """

    def __init__(self) -> None:
        self._losses: dict[Incarnation, WorkerLoss] = {}

    def __contains__(self, incarnation: Incarnation) -> bool:
        """Whether that worker is lost, and not tried again yet."""
        loss = self._losses.get(incarnation)
        return loss is not None and not loss.is_over

    def note_loss(self, incarnation: Incarnation, lease_s: float, now: float) -> None:
        """`lease_s`: the length of the worker's lease; 0 if it has not said so."""
        last = self._losses.get(incarnation)
        pause_s = 2 * last.pause_s if last and now - last.lost_at < QUIET_S else lease_s or REMEMBER_LOST_S
        self._losses[incarnation] = WorkerLoss(now, min(pause_s, REMEMBER_LOST_S))

    def note_leases(self, present: Collection[Incarnation], asked_at: float) -> list[Incarnation]:
        """Notes who has a lease, as the store said that was asked then. Returns the workers that are lost no more."""
        found = []
        for incarnation, loss in list(self._losses.items()):
            age_s, has_lease = asked_at - loss.lost_at, incarnation in present
            loss.lapsed |= not has_lease
            lives = has_lease and (loss.lapsed or age_s > loss.pause_s)
            if not loss.is_over and (lives or age_s > REMEMBER_LOST_S):
                loss.is_over = True
                found.append(incarnation)
            if age_s > QUIET_S:
                del self._losses[incarnation]
        return found


@dataclass(eq=False)
class WorkerPool:
    """One link for each worker that has a lease in the store, or whose Step stream is open.

    The link of a lost worker stays while the worker's lease lasts, until the worker is tried again by another one.
    """

    store: Store
    router_id: Incarnation
    sessions: SessionRegistry
    models: ModelRegistry
    on_lost: Callable[[Incarnation], Awaitable[None]]
    on_report: Callable[[], None]
    tls: TlsFiles | None = None
    kv_index: KvIndex = field(default_factory=KvIndex)
    links: dict[Incarnation, WorkerLink] = field(default_factory=dict)
    traceparent_of: Callable[[SequenceId], str] = lambda seq_id: ""
    _tasks: dict[Incarnation, asyncio.Task[None]] = field(default_factory=dict)
    _lost: LostWorkers = field(default_factory=LostWorkers)
    _names: OrderedDict[Incarnation, str] = field(default_factory=OrderedDict)  # of workers that were met lately

    async def discover_workers(self) -> None:
        """Reads once which workers have a lease, and waits. The router repeats this for as long as it lives."""
        asked_at = time.monotonic()
        try:
            members = await self.store.members("worker")
        except StoreUnavailable:
            members = None
        if members is not None:
            await self._update_links({member.id for member in members}, asked_at)
            self._link_new(members)
        await asyncio.sleep(DISCOVER_S)

    def find_link(self, incarnation: Incarnation) -> WorkerLink | None:
        return self.links.get(incarnation)

    def name_of(self, incarnation: Incarnation) -> str:
        """The name of a worker that was met here, even if it has gone since; empty if it was not, or long ago."""
        return self._names.get(incarnation, "")

    def has_lost(self, incarnation: Incarnation) -> bool:
        """Whether this router has seen that worker process die not long ago, and knows nothing better since."""
        return incarnation in self._lost

    def views(self, model: ServedModel) -> list[WorkerView]:
        """The workers that can run this model's sequences, whatever name they serve the model under."""
        same = (model.fingerprint, model.layout)
        met = [(link, link.facts) for link in self.links.values() if link.facts]
        return [link.view() for link, facts in met if (facts.fingerprint, facts.layout) == same]

    def present_limits(self) -> set[WorkerLimits]:
        """The limits of the workers that this router has met and that live, as far as it knows."""
        links = self.links.values()
        return {link.facts.limits for link in links if link.facts and link.has_lease and not link.lost}

    def snapshots(self) -> list[WorkerSnapshot]:
        """The workers that this router has met, without their sequences."""
        return [
            WorkerSnapshot(
                view=link.view(),
                model=link.facts.fingerprint,
                layout=link.facts.layout,
                alive=link.has_lease and not link.lost,
                draining=link.load.draining,
            )
            for link in self.links.values()
            if link.facts
        ]

    def find_hits(
        self, model: ServedModel, tokens: Sequence[int], salt: str, lora: str = "", pictures: str = ""
    ) -> dict[Incarnation, HitCounts]:
        """How many leading ones of these tokens each worker has cached: by the hashes of its own class of numerics."""
        hits: dict[Incarnation, HitCounts] = {}
        show = partial(shown, parse_pictures(pictures))
        for numerics in sorted({view.numerics for view in self.views(model)}):
            root = hashing.root_key(model.fingerprint, model.layout, lora, salt, numerics)
            hashes = hashing.block_hashes(root, tokens, model.block_size, shown=show)
            hits |= self.kv_index.find_hits(hashes, model.block_size)
        return hits

    async def close(self) -> None:
        for incarnation in list(self.links):
            await self._remove(incarnation)

    def _link_new(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.id in self.links or member.id in self._lost:
                continue
            try:
                link = WorkerLink(
                    member, self.router_id, self.sessions, self.models, self.kv_index, self.on_report, tls=self.tls
                )
            except (KeyError, TypeError, ValueError) as error:
                log.error("worker %s describes itself in a way that this router cannot read: %r", member.id, error)
                continue
            log.info("found worker %s at %s (%s)", link.worker_id, link.endpoint, link.incarnation)
            link.traceparent_of = self.traceparent_of
            self.links[member.id] = link
            self._names[member.id] = link.worker_id
            if len(self._names) > MAX_NAMES:
                self._names.popitem(last=False)
            self._tasks[member.id] = asyncio.create_task(link.keep_open(self._examine_broken))

    async def _update_links(self, present: set[Incarnation], asked_at: float) -> None:
        """Notes which workers have a lease. Removes the links of those that are gone for good, or lost no more."""
        for link in self.links.values():
            link.note_lease(present=link.incarnation in present)
        gone = [id for id, link in self.links.items() if id not in present and not link.step_stream.connected]
        found = [id for id in self._lost.note_leases(present, asked_at) if id in self.links]
        for incarnation in {*gone, *found}:
            await self._remove(incarnation)

    async def _examine_broken(self, link: WorkerLink) -> None:
        """Probes a worker with a broken stream once. If the worker is lost, its sequences are recovered."""
        if await link.probe() is ProbeResult.GONE:
            if link.load.draining:
                log.info("worker %s (%s) has left", link.worker_id, link.incarnation)
            else:
                log.warning("worker %s (%s) is lost", link.worker_id, link.incarnation)
            link.mark_lost()
            self._lost.note_loss(link.incarnation, link.lease_s, time.monotonic())
            await self.on_lost(link.incarnation)
            self.sessions.poll_records_of_owner(link.incarnation)

    async def _remove(self, incarnation: Incarnation) -> None:
        task = self._tasks.pop(incarnation, None)
        if task is not None:
            await end_tasks([task])
        await self.links.pop(incarnation).close()
