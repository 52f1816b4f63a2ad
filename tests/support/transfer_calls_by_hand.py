"""Calls of Transfer at a worker, by hand: what a source would ask for a sequence that runs on `a` of a pair."""

from typing import Any

from worker_pair import Follower, PairedWorker, WorkerPair

from octavo.internal.v1 import transfer_pb2, transfer_pb2_grpc
from octavo.store.calls import MigrateStatus
from octavo.wire import statuses


class HandCalls:
    """Each call raises ServingErrors."""

    def __init__(self, pair: WorkerPair, follower: Follower, target: PairedWorker | None = None) -> None:
        self._pair, self._seq_id, self._number = pair, follower.seq_id, 1
        self._target = target or pair.b
        self._stub = transfer_pb2_grpc.TransferStub(self._target.channel)

    async def begin(self, number: int = 1) -> None:
        """Notes the migration in the store."""
        self._number = number
        reply = await self._pair.store.mig_begin(self._seq_id, 1, number, self._target.incarnation)
        assert reply.status is MigrateStatus.OK

    async def prepare(self, **changes: Any) -> transfer_pb2.PrepareResponse:
        info = self._pair.a.runner.info
        fields = {
            "seq_id": self._seq_id, "epoch": 1, "number": self._number, "source": self._pair.a.incarnation,
            "model_fingerprint": info.fingerprint, "kv_layout": info.layout, **changes,
        }  # fmt: skip
        with statuses.serving_errors():
            return await self._stub.Prepare(transfer_pb2.PrepareRequest(**fields))

    async def extend(self, ticket: int) -> list[transfer_pb2.WantedBlock]:
        with statuses.serving_errors():
            return list((await self._stub.Extend(transfer_pb2.ExtendRequest(ticket=ticket))).wanted)

    async def finish(self, ticket: int) -> transfer_pb2.FinishResponse:
        """Without any branch: for tickets that have ended, or answered."""
        with statuses.serving_errors():
            return await self._stub.Finish(transfer_pb2.FinishRequest(ticket=ticket))

    async def abort(self, ticket: int) -> None:
        with statuses.serving_errors():
            await self._stub.Abort(transfer_pb2.AbortRequest(ticket=ticket))
