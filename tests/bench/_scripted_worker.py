"""A worker that costs nothing: it admits all that a router schedules, and makes up tokens at a steady pace."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from gpu_worker.journal.step_subscription import StepMessage, StepSubscription
from gpu_worker.serving.calls.messages import step_to_wire
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.net.server import make_server
from octavo.request.hashing import extend_chain, prompt_chain
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.sampling import FinishReason
from octavo.request.step_item import StepItem
from octavo.v1 import admin_pb2
from octavo.wire.internal import INTERNAL_REVISION
from octavo.wire.public import sampling_from_bytes

REPORT_S = 0.25
MAX_LATE_S = 0.1  # what a machine that is too busy delays longer is left out


@dataclass
class ScriptedSequence:
    """What the worker has told of a sequence."""

    epoch: int
    chain: int
    num_left: int
    num_tokens: int = 0

    def next_item(self, seq_id: str) -> StepItem:
        token = 97 + self.num_tokens % 26
        self.chain = extend_chain(self.chain, (token,))
        self.num_tokens += 1
        self.num_left -= 1
        item = StepItem(SequenceId(seq_id), self.epoch, 0, self.num_tokens - 1, [token], self.chain)
        if self.num_tokens == 1:
            item.cached_tokens = 0
        if not self.num_left:
            item.finish = FinishReason.LENGTH
        return item


@dataclass
class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Serves one router. Each step brings a token of every sequence, and only first tokens until all streams are here.

    Messages wait for the router, and are joined for it, as in a worker of this checkout.
    """

    incarnation: str
    step_s: float
    num_streams: int
    sequences: dict[str, ScriptedSequence] = field(default_factory=dict)

    async def serve(self, port: int) -> None:
        """Listens until the process ends."""
        server = make_server(internal=True)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    async def Hello(self, request: Any, context: Any) -> worker_pb2.HelloResponse:
        return worker_pb2.HelloResponse(
            worker_id="scripted",
            incarnation=self.incarnation,
            internal_revision=INTERNAL_REVISION,
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
            load = admin_pb2.WorkerLoad(num_running=len(self.sequences), num_free_blocks=1 << 20)
            yield worker_pb2.WatchResponse(
                incarnation=self.incarnation, snapshot=worker_pb2.KvSnapshot(), load=load, event_seq=1
            )
            await asyncio.sleep(REPORT_S)

    async def Schedule(self, request: Any, context: Any) -> worker_pb2.ScheduleResponse:
        for admission in request.admissions:
            sequence = ScriptedSequence(
                admission.epoch, prompt_chain(admission.prompt.ids), sampling_from_bytes(admission.sampling).max_tokens
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
        subscription = StepSubscription(router_id="router")
        next_message = getattr(subscription, "next_message", subscription.ready.popleft)  # older ones join nothing
        tasks = [asyncio.create_task(each) for each in (self._read(requests), self._run_steps(subscription))]
        try:
            while True:
                while subscription.ready:
                    yield step_to_wire(next_message(), Incarnation(self.incarnation))
                await subscription.wake.wait()
                subscription.wake.clear()
        finally:
            for task in tasks:
                task.cancel()

    async def _run_steps(self, subscription: StepSubscription) -> None:
        """Runs a step whenever one is due: an engine does not wait for its readers."""
        due, number = time.perf_counter(), 0
        while True:
            due = max(due + self.step_s, time.perf_counter() - MAX_LATE_S)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            begins = len(self.sequences) < self.num_streams
            items = [
                sequence.next_item(seq_id)
                for seq_id, sequence in self.sequences.items()
                if not (begins and sequence.num_tokens)
            ]
            for item in items:
                if item.finish:
                    del self.sequences[item.seq_id]
            if items:
                number += 1
                subscription.queue_message(StepMessage(number, items))

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            if request.HasField("unfollow"):
                self.sequences.pop(request.unfollow.seq_id, None)
