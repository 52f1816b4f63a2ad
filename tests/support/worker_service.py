"""The Worker service over real gRPC in this process, and calls of it."""

import asyncio

import grpc
import pytest
from served_worker import ServedParts

from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.serving.calls.kept_prefixes import KeptPrefixes
from gpu_worker.serving.calls.vector_calls import VectorCalls
from gpu_worker.serving.calls.worker_service import ServedWorker, WorkerService
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.net.server import make_server
from octavo.request import errors, hashing
from octavo.request.ids import Incarnation
from octavo.request.sampling import SamplingParams
from octavo.wire import statuses
from octavo.wire.channel import open_channel
from octavo.wire.public import sampling_to_wire

ADMITTED = worker_pb2.ADMISSION_OUTCOME_ADMITTED


class Service(ServedParts):
    """A worker without store and lease, and a stub to call it."""

    def __init__(self) -> None:
        runner = FakeRunner(block_size=4, num_blocks=4096, num_host_blocks=16, context_tokens=4096)
        super().__init__(runner, SchedulerConfig(max_batch_tokens=64, max_batch_sequences=16), idle_round_s=0.02)
        parts, info = self.parts, self.runner.info
        vectors = VectorCalls(parts.port, info)
        kept = KeptPrefixes(parts.port, parts.workload.tables.cache, info.num_blocks)
        self.served = ServedWorker(
            *(self.engine, parts.workload, parts.budget, self.admissions, self.publisher, self.watch, vectors, kept)
        )
        self.service = WorkerService("w", Incarnation("me"))

    async def start(self) -> None:
        self.server = make_server(internal=True)
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.endpoint = f"127.0.0.1:{port}"
        self.channel = open_channel(self.endpoint, internal=True)
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)
        await super().start()

    async def stop(self) -> None:
        await self.channel.close()
        await self.server.stop(0)
        await super().stop()

    async def schedule(self, *admissions: worker_pb2.Admission, router_id: str = "") -> list[int]:
        request = worker_pb2.ScheduleRequest(router_id=router_id, admissions=admissions)
        return [result.outcome for result in (await self.stub.Schedule(request)).results]

    async def swap(self, *items: tuple[int, int]) -> list[worker_pb2.SwapResult]:
        """Sequences, by number, and operations."""
        swaps = [worker_pb2.SwapItem(seq_id=f"{n:032x}", epoch=1, operation=operation) for n, operation in items]
        return list((await self.stub.Swap(worker_pb2.SwapRequest(items=swaps))).results)

    def step(self) -> "StepCall":
        return StepCall(self.stub)


class StepCall:
    """One open Step stream."""

    def __init__(self, stub: worker_pb2_grpc.WorkerStub) -> None:
        self.call = stub.Step()

    async def send(self, **command) -> "StepCall":
        await self.call.write(worker_pb2.StepRequest(**command))
        return self

    async def open(self, router_id: str) -> "StepCall":
        return await self.send(open=worker_pb2.Open(router_id=router_id))

    async def grant(self, steps: int) -> "StepCall":
        return await self.send(grant=worker_pb2.Grant(steps=steps))

    async def read(self) -> worker_pb2.StepResult:
        async with asyncio.timeout(20):
            return await self.call.read()

    async def rest(self) -> list[worker_pb2.StepResult]:
        """Half-closes, and reads to the end."""
        await self.call.done_writing()
        results = []
        async with asyncio.timeout(20):
            while (result := await self.call.read()) is not grpc.aio.EOF:
                results.append(result)
        return results

    async def error(self) -> errors.ServingError:
        """What the stream ends with."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async with asyncio.timeout(20):
                while await self.call.read() is not grpc.aio.EOF:
                    pass
        return statuses.error_from(raised.value)


def admission(
    number: int = 1, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 8, logprobs: int | None = None, **more
) -> worker_pb2.Admission:
    params = SamplingParams(0, max_tokens=max_tokens, best_of=1, seed=0, ignore_eos=True, logprobs=logprobs)
    fields = {"seq_id": f"{number:032x}", "epoch": 1, "priority": 3, **more}
    item = worker_pb2.Admission(sampling=sampling_to_wire(params), **fields)
    item.prompt.ids.extend(prompt)
    return item


def tokens_of(results: list[worker_pb2.StepResult], number: int = 1, prompt: tuple[int, ...] = (1, 2, 3)) -> list[int]:
    """What a reader has of a sequence after dropping duplicates; the chain is checked."""
    tokens: list[int] = []
    for item in (item for result in results for item in result.items if item.seq_id == f"{number:032x}"):
        assert item.first_index <= len(tokens)
        tokens += item.token_ids[len(tokens) - item.first_index :]
        whole = tokens[: item.first_index + len(item.token_ids)]
        assert item.chain == hashing.extend_chain(hashing.prompt_chain(prompt), whole)
    return tokens
