"""Answers calls of routers for vectors: prompts in, vectors out as they are computed, and nothing left behind."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

from gpu_worker.engine.command_port import CommandPort
from gpu_worker.pooling.pooled_sequences import check_params, pooled_sequence
from gpu_worker.pooling.vectors import vector_of
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.pooling import PoolingEnd
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.steps.runner import RunnerInfo
from octavo.internal.v1 import worker_pb2
from octavo.pooling.params import PoolingParams
from octavo.request.errors import Draining, Failure, ServingError
from octavo.wire.pooling import PromptVector, floats_to_bytes, pool_params, pooled_to_wire

Ended = asyncio.Queue[tuple[int, PoolingEnd] | None]  # None: the worker ends


class VectorCalls:
    """The calls for vectors that are under way. Lives on the event loop."""

    def __init__(self, port: CommandPort, info: RunnerInfo) -> None:
        self._port = port
        self._info = info
        self._open: set[Ended] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Ends all calls: their callers ask other workers."""
        for ended in self._open:
            ended.put_nowait(None)

    async def answer(self, request: worker_pb2.PoolRequest) -> AsyncGenerator[worker_pb2.PoolResponse, None]:
        """The vectors of a call. When the caller leaves, the prompts that are still here are dropped."""
        params = pool_params(request)
        check_params(params, self._info)
        ended: Ended = asyncio.Queue()
        sequences: dict[int, Sequence] = {}
        self._open.add(ended)
        try:
            refused = await self._begin(request, params, ended, sequences)
            if refused:
                yield worker_pb2.PoolResponse(vectors=map(pooled_to_wire, refused))
            while sequences:
                found = [await ended.get()]
                while not ended.empty():
                    found.append(ended.get_nowait())
                vectors = []
                for each in found:
                    if each is None:
                        raise Draining("this worker ends: ask another one for the rest")
                    index, end = each
                    num_tokens = len(sequences.pop(index).prompt)
                    vectors.append(pooled_to_wire(pooled(index, end, params, num_tokens)))
                yield worker_pb2.PoolResponse(vectors=vectors)
        finally:
            self._open.discard(ended)
            left = list(sequences.values())
            if left:
                self._port.tell(lambda scheduler: drop_all(scheduler, left))

    async def _begin(
        self, request: worker_pb2.PoolRequest, params: PoolingParams, ended: Ended, sequences: dict[int, Sequence]
    ) -> list[PromptVector]:
        """Has the prompts admitted, into `sequences`. Returns those that are refused."""
        loop = asyncio.get_running_loop()

        def on_end(index: int) -> Callable[[PoolingEnd], None]:
            def tell(end: PoolingEnd) -> None:
                loop.call_soon_threadsafe(ended.put_nowait, (index, end))

            return tell

        refused: list[PromptVector] = []
        for index, prompt in enumerate(request.prompts):
            try:
                sequences[index] = pooled_sequence(
                    prompt.ids,
                    params,
                    self._info,
                    on_end(index),
                    salt=request.salt,
                    priority=request.priority,
                    deadline_in_ms=request.deadline_in_ms,
                )
            except ServingError as error:
                refused.append(PromptVector(index, b"", failure=error.failure()))
        coming = dict(sequences)

        def command(scheduler: Scheduler) -> list[tuple[int, Failure | None]]:
            return [(index, scheduler.admit(sequence).failure) for index, sequence in coming.items()]

        for index, failure in await self._port.ask(command):
            if failure is not None:
                del sequences[index]
                refused.append(PromptVector(index, b"", failure=failure))
        return refused


def drop_all(scheduler: Scheduler, sequences: Iterable[Sequence]) -> None:
    for sequence in sequences:
        scheduler.drop(sequence)


def pooled(index: int, end: PoolingEnd, params: PoolingParams, num_tokens: int) -> PromptVector:
    """What became of a prompt: its vector, or why there is none."""
    try:
        vector = vector_of(end, params, num_tokens)
    except ServingError as error:
        return PromptVector(index, b"", failure=error.failure())
    return PromptVector(index, floats_to_bytes(vector), end.cached_tokens)
