"""The metrics of a router, read from what its parts have counted."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from octavo.metrics.aliases import ModelLoad, alias_values
from octavo.metrics.value import MetricValue
from octavo.request.errors import StoreUnavailable
from octavo.request.record import AdmissionOutcome
from octavo.store.base import Store
from octavo.store.calls import NOTHING_WAITS, QueueDepth, TakeReason
from router.fleet.model_registry import ModelRegistry
from router.fleet.worker_link import WorkerLink
from router.fleet.worker_pool import WorkerPool
from router.named.named_adapters import NamedAdapters
from router.placing.assigner import Assigner
from router.pooling.vector_dispatcher import VectorDispatcher
from router.streaming.progress.progress_registry import ProgressRegistry
from router.streaming.prompts.picture_tally import PictureTally

DEPTH_INTERVAL_S = 1.0
NO_MODEL = ""  # the name where no model is known
STATES = ("available", "unavailable", "draining", "lost")


@dataclass(eq=False)
class RouterMetrics:
    """A source of metric values, which asks the store now and then how much waits for any router."""

    store: Store
    models: ModelRegistry
    pool: WorkerPool
    assigner: Assigner
    progress: ProgressRegistry
    vectors: VectorDispatcher
    adapters: NamedAdapters | None = None
    pictures: PictureTally = field(default_factory=PictureTally)
    waits_for_workers: bool = False  # whether requests for a model without a worker wait for one
    _depths: Mapping[str, QueueDepth] | None = None  # by fingerprint

    async def read_depth(self) -> None:
        """Asks the store once, and waits. The router repeats this for as long as it lives."""
        try:
            self._depths = await self.store.model_depths()
        except StoreUnavailable:
            self._depths = None  # no value is better than an old one
        await asyncio.sleep(DEPTH_INTERVAL_S)

    def values(self) -> Iterator[MetricValue]:
        """All values of now. Those of a model are there from when it is known, at 0."""
        for model in self.models.list_models():
            self.progress.tally.of_model(model.name)
        yield from self.progress.values()
        yield from self.pictures.values()
        yield from self._queue()
        for reason in TakeReason:
            yield MetricValue("octavo_takes_total", self.assigner.takes[reason], (reason.value,))
        for outcome in AdmissionOutcome:
            yield MetricValue("octavo_admissions_total", self.assigner.answers[outcome], (outcome.value,))
        yield MetricValue("octavo_admissions_total", self.assigner.num_unanswered, ("none",))
        for model in self.models.list_models():
            changes = self.assigner.numerics_changes[model.name]
            yield MetricValue("octavo_numerics_changes_total", changes, (model.name,))
            yield MetricValue("octavo_vectors_total", self.vectors.num_vectors[model.name], (model.name,))
            sent_again = self.vectors.num_sent_again[model.name]
            yield MetricValue("octavo_vector_prompts_sent_again_total", sent_again, (model.name,))
        yield MetricValue("octavo_vector_prompts", self.vectors.num_under_way)
        yield from self._workers()
        yield MetricValue("octavo_waits_for_workers", self.waits_for_workers)
        for place, num_blocks in self.pool.kv_index.num_blocks.items():
            yield MetricValue("octavo_kv_index_blocks", num_blocks, (place,))

    def alias_values(self) -> Iterator[MetricValue]:
        """The values of now under the names that gateways know."""
        states, views = self.progress.stream_states(), self.pool.views
        names = (
            {(each.model, each.digest): each.name for each in reversed(self.adapters.all())} if self.adapters else {}
        )
        used = {(names.get((model, digest), digest), waits) for model, digest, waits in self.progress.adapters()}
        yield from alias_values(
            [
                ModelLoad(
                    model=model.name,
                    num_waiting=states[model.name, True],
                    num_running=states[model.name, False],
                    num_used_blocks=sum(
                        max(0, each.num_blocks - each.num_free_blocks - each.num_cached_blocks) for each in views(model)
                    ),
                    num_blocks=sum(each.num_blocks for each in views(model)),
                    block_size=model.block_size,
                )
                for model in self.models.list_models()
            ],
            running=[name for name, waits in used if not waits],
            waiting=[name for name, waits in used if waits],
        )

    def _queue(self) -> Iterator[MetricValue]:
        """What waits, by model. What waits for a model that this router does not know has no name."""
        if self._depths is None:
            return
        left = dict(self._depths)
        found = [(model.name, left.pop(model.fingerprint, NOTHING_WAITS)) for model in self.models.list_models()]
        if left or not found:
            num_queued = sum(depth.num_queued for depth in left.values())
            queued_tokens = sum(depth.queued_tokens for depth in left.values())
            found.append((NO_MODEL, QueueDepth(num_queued, queued_tokens)))
        for name, depth in found:
            yield MetricValue("octavo_queue_requests", depth.num_queued, (name,))
            yield MetricValue("octavo_queue_tokens", depth.queued_tokens, (name,))

    def _workers(self) -> Iterator[MetricValue]:
        """Workers by model and state. Those that were not met yet, and of no known model, have no name."""
        links = self.pool.links.values()
        states = Counter((link.facts.model if link.facts else NO_MODEL, _state_of(link)) for link in links)
        names = [model.name for model in self.models.list_models()] or [NO_MODEL]
        for key in sorted({*states, *product(names, STATES)}):
            yield MetricValue("octavo_workers", states[key], key)


def _state_of(link: WorkerLink) -> str:
    if link.lost:
        return "lost"
    if link.load.draining:
        return "draining"
    return "available" if link.view().available else "unavailable"
