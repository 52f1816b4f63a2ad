"""A worker that costs nothing: it admits all that a router schedules, and makes up tokens at a steady pace."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from octavo import rpc, wire
from octavo.hashing import extend_chain, prompt_chain
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc

REPORT_S = 0.25


@dataclass
class ScriptedSequence:
    """What the worker has told of a sequence."""

    epoch: int
    chain: int
    num_left: int
    num_tokens: int = 0

    def next_item(self, seq_id: str) -> worker_pb2.StepItem:
        token = 97 + self.num_tokens % 26
        self.chain = extend_chain(self.chain, (token,))
        self.num_tokens += 1
        self.num_left -= 1
        item = worker_pb2.StepItem(
            seq_id=seq_id, epoch=self.epoch, first_index=self.num_tokens - 1, token_ids=(token,), chain=self.chain
        )
        if self.num_tokens == 1:
            item.cached_tokens = 0
        if not self.num_left:
            item.finish_reason = wire.types_pb2.FINISH_REASON_LENGTH
        return item


@dataclass
class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Serves one router. Each step brings a token of every sequence, or while `begins` only each one's first token."""

    incarnation: str
    step_s: float
    begins: bool = False
    sequences: dict[str, ScriptedSequence] = field(default_factory=dict)

    async def start(self) -> str:
        """Listens. Returns the endpoint."""
        self._server = rpc.server(internal=True)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Hello(self, request: Any, context: Any) -> worker_pb2.HelloResponse:
        return worker_pb2.HelloResponse(
            worker_id="scripted",
            incarnation=self.incarnation,
            internal_revision=wire.INTERNAL_REVISION,
            model="scripted",
            model_fingerprint="scripted",
            block_size=16,
            kv_dtype="float32",
            kv_layout="scripted",
            num_blocks=1 << 20,
            context_tokens=1 << 20,
            max_sequence_blocks=1 << 16,
            vocab_size=256,
            tokenizer="octavo:bytes",
            max_batch_tokens=1 << 16,
            max_batch_sequences=1 << 12,
            device="cpu",
        )

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WatchResponse]:
        while True:
            load = worker_pb2.Load(num_running=len(self.sequences), num_free_blocks=1 << 20)
            yield worker_pb2.WatchResponse(
                incarnation=self.incarnation, snapshot=worker_pb2.KvSnapshot(), load=load, event_seq=1
            )
            await asyncio.sleep(REPORT_S)

    async def Schedule(self, request: Any, context: Any) -> worker_pb2.ScheduleResponse:
        for admission in request.admissions:
            sequence = ScriptedSequence(
                admission.epoch, prompt_chain(admission.prompt.ids), admission.sampling.max_tokens
            )
            self.sequences[admission.seq_id] = sequence
        outcome = worker_pb2.ADMISSION_OUTCOME_ADMITTED
        return worker_pb2.ScheduleResponse(
            results=[worker_pb2.AdmissionResult(seq_id=each.seq_id, outcome=outcome) for each in request.admissions]
        )

    async def Cancel(self, request: Any, context: Any) -> worker_pb2.WorkerCancelResponse:
        for each in request.sequences:
            self.sequences.pop(each.seq_id, None)
        return worker_pb2.WorkerCancelResponse()

    async def Step(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[worker_pb2.StepResult]:
        reading = asyncio.create_task(self._read(requests))
        due, number = time.perf_counter(), 0
        try:
            while True:
                due += self.step_s  # an engine does not wait for routers: after a late step comes the next one at once
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                items = [
                    sequence.next_item(seq_id)
                    for seq_id, sequence in self.sequences.items()
                    if not (self.begins and sequence.num_tokens)
                ]
                if not items:
                    due = time.perf_counter()
                    continue
                number += 1
                for item in items:
                    if item.finish_reason:
                        del self.sequences[item.seq_id]
                yield worker_pb2.StepResult(step_id=number, incarnation=self.incarnation, items=items)
        finally:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            if request.HasField("unfollow"):
                self.sequences.pop(request.unfollow.seq_id, None)
