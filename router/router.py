"""Puts a router together and takes it down."""

import asyncio
import json
import logging
import os

from octavo.metrics.aliases import VLLM
from octavo.metrics.web import WebApp
from octavo.net.security.protection import client_authorizer, tls_of
from octavo.net.security.trail import AccessTrail, ListenerKind
from octavo.net.traces import RequestTracer
from octavo.pictures.reader import PictureLimits
from octavo.process.listen_address import exposed_addresses
from octavo.process.loop import end_tasks
from octavo.process.retry import until_answered
from octavo.request.ids import Incarnation
from octavo.request.limits import TenantQuota
from octavo.settings.router import RouterSettings, parse_aliases
from octavo.store.base import Store
from octavo.store.calls import Member, QueueLimits
from octavo.store.store_tally import StoreTally
from octavo.text.tokenizers.tokenizer import Tokenizer
from router.admin.admin_service import AdminService
from router.admin.cluster_watch import ClusterWatch
from router.attachment_outbox import AttachmentOutbox
from router.background_tasks import BackgroundTasks, repeat_forever
from router.dashboard.dashboard import dashboard_routes
from router.fleet.limits_registry import LimitsRegistry
from router.fleet.model_registry import ModelRegistry
from router.fleet.model_watch import ModelWatch
from router.fleet.worker_pool import WorkerPool
from router.health_monitor import INFERENCE, HealthMonitor
from router.http.answers import AnswerService
from router.http.app import OpenAiApp
from router.http.bodies.sound_room import SoundRoom
from router.http.paths.adapters import AdapterEndpoint
from router.listeners import RouterListeners
from router.named.named_adapters import NamedAdapters
from router.named.named_prefixes import NamedPrefixes
from router.placing.assigner import Assigner
from router.placing.dispatcher import Dispatcher
from router.placing.migrator import Migrator
from router.placing.rebalancer import Rebalancer
from router.pooling.pooling_calls import PoolingCalls
from router.pooling.pooling_gate import PoolingGate
from router.pooling.vector_dispatcher import VectorDispatcher
from router.prefixes.prefix_keeper import PrefixKeeper
from router.prefixes.prefix_maker import PrefixMaker
from router.router_lease import RouterLease
from router.router_metrics import RouterMetrics
from router.session_registry import SessionRegistry
from router.streaming.inference_service import InferenceService
from router.streaming.progress.progress_registry import ProgressRegistry
from router.streaming.prompts.picture_prompts import PicturePrompts
from router.streaming.request_deadline import DeadlineMargin
from router.streaming.request_preparer import RequestPreparer
from router.streaming.resume_tokens import ResumeTokens
from router.streaming.session import SessionContext
from router.streaming.session_opener import SessionOpener
from router.streaming.session_waves import SessionWaves
from router.tools.output_forms import OutputForms

log = logging.getLogger(__name__)

TELLING_S = 0.25  # how long a router that drains still answers new calls, with DRAINING
ASSIGNING_GRACE_S = 2.5  # as long as a Schedule may take
LEAVE_PATIENCE_S = 3.0  # how long the store may take to note that the router has left
URGENT_PATIENCE_S = 0.5  # the same two where a person waits for the end


class Router:
    """One life of a router process. All that a request depends on can be built again from the store and the workers."""

    def __init__(
        self,
        settings: RouterSettings,
        store: Store,
        secret: bytes,
        incarnation: Incarnation,
        tokenizer: Tokenizer | None = None,
        store_tally: StoreTally | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        """Raises TlsError or ApiKeyError."""
        self._settings = settings
        self.trail = AccessTrail(ListenerKind.GRPC, ListenerKind.HTTP, ListenerKind.ADMIN, ListenerKind.PAGES)
        self._tls = tls_of(settings, self.trail)
        self.authorizer = client_authorizer(settings, self.trail)
        self._store = store
        self.incarnation = incarnation
        self.sessions = SessionRegistry()
        self.models = ModelRegistry(parse_aliases(settings.model_aliases), tokenizer)
        self.pool = WorkerPool(
            store,
            incarnation,
            self.sessions,
            self.models,
            on_lost=lambda worker: self.dispatcher.recover_sequences_of(worker),
            on_report=lambda: self.dispatcher.note_room(),
            tls=self._tls,
        )
        self._background = BackgroundTasks()
        self.limits = LimitsRegistry(store, self.pool.present_limits, settings.worker_return_ms)
        self.models.served_lately = self.limits.served_lately
        self.assigner = Assigner(store, self.pool, self.sessions, self.models, self.limits, self._background)
        self.dispatcher = Dispatcher(
            store, incarnation, self.pool, self.assigner, self.sessions, self._background, settings.grace_ms
        )
        self._resume_tokens = ResumeTokens(secret, store.generation)
        self._generation = store.generation  # the one that the router has prepared itself for
        self.attachments = AttachmentOutbox(store, incarnation, self.sessions)
        self.migrator = Migrator(store, self.pool, self.models, self._background)
        self.assigner.on_admitted = self.migrator.note_owner
        margin = DeadlineMargin()
        self.sessions.on_lateness = lambda seconds: margin.note_lateness(seconds, self.sessions.now)
        context = SessionContext(
            store,
            incarnation,
            self.sessions,
            self.pool,
            self.dispatcher,
            self.attachments,
            self._resume_tokens,
            margin,
            progress := ProgressRegistry(tracer, self.pool.name_of),
            SessionWaves(),
            self.migrator.note_owner,
        )
        self.prefixes = NamedPrefixes(store)
        self.adapters = NamedAdapters(store, self.models)
        self.prefix_keeper = PrefixKeeper(self.prefixes, self.pool, self._background)
        sizes = (settings.picture_count, settings.picture_bytes, settings.picture_pixels, settings.picture_tokens)
        pictures = PicturePrompts(PictureLimits(*sizes), settings.picture_hosts)
        preparer = RequestPreparer(
            self.models,
            incarnation,
            self.authorizer,
            prefixes=self.prefixes,
            adapters=self.adapters,
            pictures=pictures,
            wait_for_workers=settings.wait_for_workers,
        )
        self.prefix_maker = PrefixMaker(self.prefixes, self.models, store, preparer.beginning)
        limits = QueueLimits(
            settings.max_queued_requests,
            settings.max_queued_tokens,
            settings.max_tenant_requests,
            settings.max_tenant_tokens,
            TenantQuota(settings.tenant_max_streams, settings.tenant_tokens_per_minute),
        )
        self._opener = opener = SessionOpener(
            context, self.models, preparer, limits, settings.max_streams, self.authorizer
        )
        self.pooling = PoolingCalls(
            self.models,
            VectorDispatcher(self.pool, waits_for_workers=settings.wait_for_workers),
            PoolingGate(limits),
            self.authorizer,
            limits.quota,
            progress.count_refusal,
            wait_for_workers=settings.wait_for_workers,
        )
        self.inference = InferenceService(opener, store, self.dispatcher, self.models, preparer, progress, self.pooling)
        self._answers = AnswerService(
            opener,
            preparer,
            self.inference,
            self._background,
            OutputForms(settings.tool_parser, settings.reasoning_parser),
            settings.http_unknown_fields,
            settings.responses_retain_s,
            SoundRoom(settings.sound_bytes),
        )
        self.rebalancer = Rebalancer(store, incarnation, self.pool, self.migrator, self._background)
        self.cluster = ClusterWatch(store, incarnation, settings.router_id, self.pool, progress)
        self.admin = AdminService(
            *(store, incarnation, self.pool, self.assigner, preparer, self.migrator, self.cluster, self.prefix_keeper),
            self.prefix_maker,
            self.adapters,
        )
        self._tracer = tracer
        if tracer is not None:
            self.pool.traceparent_of = progress.traceparent_of
        self.metrics = RouterMetrics(
            store,
            self.models,
            self.pool,
            self.assigner,
            progress,
            self.pooling.dispatcher,
            self.adapters,
            pictures.tally,
            waits_for_workers=settings.wait_for_workers,
        )
        self.web_app = WebApp(
            "router",
            lambda: self.listeners.public_health.is_serving(INFERENCE),
            lambda service: self.listeners.public_health.is_serving(service),
            dashboard_routes(
                self.cluster,
                local_names_only=self._tls is None and not exposed_addresses([settings.web_listen]),
                trail=self.trail,
            ),
        )
        self.web_app.exporter.add_source(self.metrics.values)
        self.web_app.exporter.add_source(self.trail.values)
        self.web_app.exporter.add_source(self.authorizer.values)
        if settings.metric_aliases == VLLM:
            self.web_app.exporter.add_source(self.metrics.alias_values)
        if store_tally is not None:
            self.web_app.exporter.add_source(store_tally.values)
        self.listeners = RouterListeners(
            settings, self._tls, self.authorizer, self.trail, with_traces=tracer is not None
        )
        self._urgent = False  # whether whoever asked the router to leave waits for its end
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def endpoint(self) -> str:
        """Where clients call it over gRPC."""
        return self.listeners.endpoint

    @property
    def http_endpoint(self) -> str:
        return self.listeners.http_endpoint

    @property
    def web_endpoint(self) -> str:
        return self.listeners.web_endpoint

    async def start(self) -> None:
        """Listens, tells the store of this router, and starts the loops. Raises ListenError.

        The store knows this router before a client can call it: a sweep cancels requests of routers without a lease.
        """
        settings, listeners = self._settings, self.listeners
        openai = OpenAiApp(
            self._answers,
            self.inference,
            AdapterEndpoint(self.adapters, self._answers.bodies, settings.adapter_folder, self.trail),
            self.models,
            self.authorizer,
            lambda: listeners.public_health.is_serving(),
        )
        await listeners.open(self.inference, self.admin, openai, self.web_app)
        info = {
            "router_id": settings.router_id or f"router-{listeners.endpoint.replace(':', '-')}",
            "endpoint": listeners.endpoint,
            "admin_endpoint": listeners.admin_endpoint,
            "http_endpoint": listeners.http_endpoint,
            "pid": os.getpid(),
        }
        self.cluster.router_name = str(info["router_id"])
        self.lease = RouterLease(
            self._store,
            Member("router", self.incarnation, json.dumps(info).encode()),
            settings.lease_ms,
            self.sessions,
            self.attachments,
            self._resume_tokens,
            self._generation,
        )
        await until_answered(self.lease.renew, what="start")
        health = HealthMonitor(
            self._store,
            self.pool,
            listeners.public_health,
            listeners.admin_health,
            wait_for_workers=settings.wait_for_workers,
        )
        loops = [
            self.sessions.keep_time(),
            self.dispatcher.keep_dispatching(),
            self.attachments.keep_telling(),
            repeat_forever("discovery", self.pool.discover_workers),
            repeat_forever("limits", self.limits.keep),
            repeat_forever("prefixes", self.prefix_keeper.keep),
            repeat_forever("adapters", self.adapters.keep),
            repeat_forever("prefixes of earlier models", self.prefix_maker.follow_models),
            repeat_forever("lease", self.lease.keep),
            repeat_forever("generation", self.lease.follow_generation),
            repeat_forever("health", health.report),
            repeat_forever("queue depth", self.metrics.read_depth),
        ]
        if settings.wait_for_workers:
            loops.append(repeat_forever("models", ModelWatch(self._store, self.models, self.pool).exchange))
        if settings.rebalance:
            loops.append(repeat_forever("rebalancing", self.rebalancer.rebalance))
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        await listeners.serve()
        log.info("%s (%s) listens on %s", info["router_id"], self.incarnation, listeners.endpoint)

    async def leave(self, urgent: asyncio.Event) -> None:
        """Refuses new calls at once. Returns when no call is left, when `drain_ms` have passed, or if `urgent` is set.

        Until then streams go on, and sequences are assigned to workers, as this router may be the only one.
        """
        self.listeners.say_not_serving()
        self._opener.refuse_sessions()
        self.pooling.gate.refuse_calls()
        log.info("draining: no new calls, %d to go", self._opener.num_sessions)
        waiting = [asyncio.create_task(each) for each in (self._lose_sessions(), urgent.wait())]
        await asyncio.wait(waiting, timeout=self._settings.drain_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        self._urgent = urgent.is_set()

    async def _lose_sessions(self) -> None:
        """Returns when no session is open. First probes and callers are told, then connections are: a client that has
        the address of a balancer connects again, to another router, while its streams here go on.
        """
        await asyncio.sleep(TELLING_S)
        closing = asyncio.create_task(self.listeners.refuse_clients(self._settings.drain_ms / 1000))
        try:
            await self._opener.wait_until_empty()
            await self.pooling.gate.wait_until_empty()
        finally:
            closing.cancel()

    async def stop(self) -> None:
        """Ends the streams of all clients, which attach elsewhere, and the lease. The workers go on.

        What this router has begun to assign, it still assigns: no sequence is left with an owner that was not told.
        """
        self.listeners.say_not_serving()
        if self._opener.num_sessions:
            log.info("ending %d streams: their clients attach elsewhere", self._opener.num_sessions)
        self.inference.close()
        self._answers.close()
        await self.listeners.stop()
        await self.dispatcher.stop_assigning(URGENT_PATIENCE_S if self._urgent else ASSIGNING_GRACE_S)
        await end_tasks(self._tasks)
        await self._background.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        await self.attachments.close()
        await self.pooling.dispatcher.close()
        await self.pool.close()
        await self.lease.end(URGENT_PATIENCE_S if self._urgent else LEAVE_PATIENCE_S)

    async def wait_for_failure(self) -> None:
        """Returns, or raises, when one of the loops has ended. As long as nothing is wrong, none ends."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()
