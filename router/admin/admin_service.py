"""The Admin service: what this router knows of workers, sequences and placements, for operators."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from octavo.net.security.authorizer import acting_for
from octavo.request import limits, validation
from octavo.request.errors import InvalidArgument, NotFound
from octavo.request.ids import Incarnation, sequence_id
from octavo.request.named_prefix import NamedPrefix, validate_prefix_name
from octavo.store.base import Store
from octavo.v1 import admin_pb2, admin_pb2_grpc
from router.admin.cluster_watch import ClusterWatch
from router.admin.messages import decision_to_wire, sequence_to_wire, shared_fields, worker_to_wire
from router.fleet.model_registry import ServedModel
from router.fleet.worker_link import WorkerLink
from router.fleet.worker_pool import WorkerPool
from router.named.named_adapters import NamedAdapter, NamedAdapters
from router.placing.assigner import Assigner
from router.placing.migrator import Migrator
from router.prefixes.prefix_keeper import PrefixKeeper
from router.prefixes.prefix_maker import PrefixMaker
from router.streaming.request_preparer import RequestPreparer

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[object, object]

MAX_SEQUENCES = 10_000
DEFAULT_SEQUENCES = 1000


@dataclass(eq=False)
class AdminService(admin_pb2_grpc.AdminServicer):
    """The service that operators call."""

    store: Store
    router_id: Incarnation
    pool: WorkerPool
    assigner: Assigner
    preparer: RequestPreparer
    migrator: Migrator
    cluster: ClusterWatch
    keeper: PrefixKeeper
    maker: PrefixMaker
    adapters: NamedAdapters

    def serve_on(self, server: "grpc.aio.Server") -> None:
        admin_pb2_grpc.add_AdminServicer_to_server(self, server)

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: "Context"
    ) -> admin_pb2.ListWorkersResponse:
        links = sorted(self.pool.links.values(), key=lambda link: link.worker_id)
        depth = await self.store.queue_depth()
        return admin_pb2.ListWorkersResponse(
            workers=[worker_to_wire(link) for link in links], router_id=self.router_id, num_queued=depth.num_queued
        )

    async def ListSequences(
        self, request: admin_pb2.ListSequencesRequest, context: "Context"
    ) -> admin_pb2.ListSequencesResponse:
        if request.limit > MAX_SEQUENCES:
            raise InvalidArgument("limit", f"{request.limit} is too many; at most {MAX_SEQUENCES}")
        records = await self.store.list_sequences(
            Incarnation(request.owner) if request.owner else None, request.limit or DEFAULT_SEQUENCES
        )
        records.sort(key=lambda record: record.accepted_ms)
        # Any read brings the time of the store's clock, by which all times in records are.
        snapshot = await self.store.read(records[-1].seq_id) if records else None
        now_ms = snapshot.now_ms if snapshot else 0
        return admin_pb2.ListSequencesResponse(sequences=[sequence_to_wire(record, now_ms) for record in records])

    async def ExplainPlacement(
        self, request: admin_pb2.ExplainPlacementRequest, context: "Context"
    ) -> admin_pb2.ExplainPlacementResponse:
        match request.WhichOneof("what"):
            case "request_id":
                request_id = validation.validate_request_id(request.request_id)
                decision = self.assigner.decisions.get(sequence_id(request.tenant, request_id))
                if decision is None:
                    raise NotFound(
                        "request_id: this router did not place it, or has forgotten it; ask another router",
                        resource="request",
                        name=request_id,
                    )
            case "hypothetical":
                try:
                    with acting_for(request.tenant):
                        prepared = await self.preparer.prepare(request.hypothetical)
                except InvalidArgument as error:
                    raise error.inside("hypothetical") from None
                new = prepared.new
                decision = self.assigner.decide_placement(
                    prepared.model, list(new.prompt), new.salt, set(), lora=new.lora, pictures=new.pictures
                )
            case _:
                raise InvalidArgument("what", "send a request_id or a hypothetical request")
        return decision_to_wire(decision)

    async def Migrate(self, request: admin_pb2.MigrateRequest, context: "Context") -> admin_pb2.MigrateResponse:
        request_id = validation.validate_request_id(request.request_id)
        target = self._link_of(request.worker_id) if request.worker_id else None
        report = await self.migrator.migrate(sequence_id(request.tenant, request_id), target)
        link = self.pool.find_link(report.target)
        worker_id = link.worker_id if link else report.target  # of a worker that was not met no name is known
        return admin_pb2.MigrateResponse(**shared_fields(report, admin_pb2.MigrateResponse), worker_id=worker_id)

    async def DrainWorker(
        self, request: admin_pb2.DrainWorkerRequest, context: "Context"
    ) -> AsyncIterator[admin_pb2.DrainWorkerResponse]:
        if not request.worker_id:
            raise InvalidArgument("worker_id", "name the worker, as ListWorkers does")
        if request.grace_ms > limits.MAX_DRAIN_MS:
            raise InvalidArgument("grace_ms", f"{request.grace_ms} is more than {limits.MAX_DRAIN_MS}, an hour")
        async with aclosing(self._link_of(request.worker_id).drain(request.grace_ms, undo=request.undo)) as drain:
            async for progress in drain:
                yield admin_pb2.DrainWorkerResponse(**shared_fields(progress, admin_pb2.DrainWorkerResponse))

    async def AddPrefix(self, request: admin_pb2.AddPrefixRequest, context: "Context") -> admin_pb2.AddPrefixResponse:
        name, source = validate_prefix_name("name", request.name), request.WhichOneof("begins")
        model = self._model_of(request)
        if source is None:
            raise InvalidArgument("begins", "send system or text")
        self.preparer.authorizer.require_tenant(request.tenant)
        prefix = await self.maker.make(
            *(model, request.tenant, name, getattr(request, source)),
            is_system=source == "system",
            workers=request.workers,
        )
        await self.keeper.prefixes.add(prefix)
        return admin_pb2.AddPrefixResponse(prefix=self._shown(prefix))

    async def RemovePrefix(
        self, request: admin_pb2.RemovePrefixRequest, context: "Context"
    ) -> admin_pb2.RemovePrefixResponse:
        name = validate_prefix_name("name", request.name)
        await self.keeper.prefixes.remove(self._model_of(request).fingerprint, request.tenant, name)
        return admin_pb2.RemovePrefixResponse()

    async def ListPrefixes(
        self, request: admin_pb2.ListPrefixesRequest, context: "Context"
    ) -> admin_pb2.ListPrefixesResponse:
        await self.keeper.prefixes.refresh()
        return admin_pb2.ListPrefixesResponse(prefixes=map(self._shown, self.keeper.prefixes.all()))

    async def AddAdapter(
        self, request: admin_pb2.AddAdapterRequest, context: "Context"
    ) -> admin_pb2.AddAdapterResponse:
        model = request.model if request.HasField("model") else None
        adapter = await self.adapters.add(request.name, request.source, model)
        return admin_pb2.AddAdapterResponse(adapter=self._shown_adapter(adapter))

    async def RemoveAdapter(
        self, request: admin_pb2.RemoveAdapterRequest, context: "Context"
    ) -> admin_pb2.RemoveAdapterResponse:
        await self.adapters.remove(request.name)
        return admin_pb2.RemoveAdapterResponse()

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: "Context"
    ) -> admin_pb2.ListAdaptersResponse:
        await self.adapters.refresh()
        return admin_pb2.ListAdaptersResponse(adapters=map(self._shown_adapter, self.adapters.all()))

    def _shown_adapter(self, adapter: NamedAdapter) -> admin_pb2.Adapter:
        links = [link for link in self.pool.links.values() if link.facts and link.facts.model == adapter.model]
        there = [link.worker_id for link in links if adapter.digest in link.view().adapters]
        num_workers = sum(not link.lost for link in links)
        return admin_pb2.Adapter(**asdict(adapter), loaded_on=sorted(there), num_workers=num_workers)

    def _model_of(self, request: admin_pb2.AddPrefixRequest | admin_pb2.RemovePrefixRequest) -> ServedModel:
        return self.preparer.models.find_by_name(request.model if request.HasField("model") else None)

    def _shown(self, prefix: NamedPrefix) -> admin_pb2.NamedPrefix:
        served = self.preparer.models.find_by_fingerprint(prefix.model)
        return admin_pb2.NamedPrefix(
            name=prefix.name,
            model=served.name if served else prefix.served_as or prefix.model,
            tenant=prefix.tenant,
            is_system=prefix.is_system,
            num_tokens=len(prefix.tokens),
            workers=prefix.workers,
            warm_on=self.keeper.warm_on(prefix),
            full_on=self.keeper.full_on(prefix),
            num_requests=self.keeper.prefixes.num_requests[prefix.key],
        )

    def _link_of(self, worker_id: str) -> WorkerLink:
        """This router's link to the living worker of that name. Raises NotFound."""
        named = [link for link in self.pool.links.values() if link.worker_id == worker_id and not link.lost]
        if not named:
            known = ", ".join(sorted({link.worker_id for link in self.pool.links.values() if not link.lost}))
            raise NotFound(
                f"worker_id: this router knows no worker {worker_id!r}; it knows: {known or 'none'}",
                resource="worker",
                name=worker_id,
            )
        return max(named, key=lambda link: (link.step_stream.connected, link.load_at))

    async def WatchCluster(
        self, request: admin_pb2.WatchClusterRequest, context: "Context"
    ) -> AsyncIterator[admin_pb2.WatchClusterResponse]:
        async with aclosing(self.cluster.watch(request.interval_ms)) as views:
            async for view in views:
                yield view.message
