"""Each call of Transfer loses its answer, or comes twice: between two whole workers, and nobody notices.

An answer is lost as a broken connection loses it: the call was carried out, and its caller gets UNAVAILABLE. A call
that comes twice comes at the same time, or after the answer to the first.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest
from effort import diagonal
from prefixes import NUM_BLOCKS, PREFIX, PROMPT, compute, lets_go
from waiting import until
from worker_pair import Follower, WorkerPair, greedy, worker_pair

from gpu_worker.migration.transfer_service import TransferService
from octavo.internal.v1 import worker_pb2
from octavo.process import failpoints
from octavo.request.errors import NotFound, ServingError

MOVED = worker_pb2.MIGRATION_OUTCOME_MOVED
STAYED = worker_pb2.MIGRATION_OUTCOME_STAYED
CALLS = ["Prepare", "Extend", "Finish", "Abort"]
PARAMS = greedy(200)
SLOW = {"step_s": 0.01, "block_size": 16}  # few blocks become full while a round takes place, however busy the machine


class Mishap:
    """What happens to the first calls of one method. `late` are repetitions that still come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, what: str, times: int = 1) -> None:
        self.num_calls = 0
        self.late: list[Callable[[], Awaitable[object]]] = []
        self._what, self._left = what, times
        self._handler = getattr(TransferService, method)
        handle = self._handle

        async def handled(service: TransferService, request: Any, context: Any) -> Any:
            return await handle(service, request, context)

        monkeypatch.setattr(TransferService, method, handled)

    async def _handle(self, service: TransferService, request: Any, context: Any) -> Any:
        self.num_calls += 1
        self._left -= 1
        if self._left < 0:
            return await self._handler(service, request, context)
        if self._what == "twice at once":
            answers = [self._handler(service, request, context) for _ in range(2)]
            return (await asyncio.gather(*answers))[0]
        answer = await self._handler(service, request, context)
        if self._what == "lost":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        self.late.append(lambda: self._handler(service, request, context))
        return answer

    async def come_late(self) -> list[ServingError]:
        """Carries the repetitions out. Returns what they were refused with."""
        refusals = []
        for again in self.late:
            try:
                await again()
            except ServingError as error:
                refusals.append(error)
        return refusals


async def grown(pair: WorkerPair, follower: Follower) -> int:
    """Arms a pause after the first round, long enough for more blocks to become full."""
    num_before = min((await pair.record(follower.seq_id)).num_tokens)

    async def wait() -> None:
        async def enough() -> bool:
            return min((await pair.record(follower.seq_id)).num_tokens) >= num_before + 40

        await until(enough)

    failpoints.arm("source.sent", wait)
    return num_before


async def check_end(pair: WorkerPair, follower: Follower, *, moved: bool) -> None:
    record = await pair.check_end(follower, PARAMS)
    owner = pair.b if moved else pair.a
    assert (record.owner, record.epoch, record.crashes) == (owner.incarnation, 1 + moved, 0)
    await pair.has_let_go()
    assert not (pair.a.runner.mismatches or pair.b.runner.mismatches)


@pytest.mark.parametrize(("call", "what"), diagonal(CALLS, ["lost", "twice at once", "twice, late"]))
async def test_a_sequence_moves_although_an_answer_is_lost_or_a_call_comes_twice(call, what, monkeypatch):
    mishap = Mishap(monkeypatch, call, what)
    async with worker_pair(**SLOW) as pair:
        follower = await pair.run(PARAMS)
        await grown(pair, follower)
        if call == "Abort":
            failpoints.arm("source.finishing", "error")
        last = (await pair.a.migrate(follower.seq_id))[-1]
        moved = call != "Abort"
        assert last.outcome == (MOVED if moved else STAYED), last
        await until(lambda: mishap.num_calls >= (2 if what == "lost" and call != "Finish" else 1))
        failpoints.disarm_all()
        for refusal in await mishap.come_late():
            assert (isinstance(refusal, NotFound) and call == "Extend") or call == "Prepare", refusal
        await check_end(pair, follower, moved=moved)


@pytest.mark.parametrize("call", ["Prepare", "Extend", "Finish"])
async def test_where_no_answer_comes_at_all_there_is_one_owner(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mishap = Mishap(monkeypatch, call, "lost", times=100)
    async with worker_pair(**SLOW) as pair:
        follower = await pair.run(PARAMS)
        await grown(pair, follower)
        last = (await pair.a.migrate(follower.seq_id, target=pair.b.incarnation))[-1]
        moved = call == "Finish"
        assert last.outcome == (MOVED if moved else STAYED)
        assert moved or last.failure.reason == "UNREACHABLE"
        assert mishap.num_calls == (1 if moved else 2)
        failpoints.disarm_all()
        await check_end(pair, follower, moved=moved)


@pytest.mark.parametrize("what", ["lost", "twice at once", "twice, late"])
async def test_a_fetch_whose_answer_is_lost_or_that_comes_twice(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mishap = Mishap(monkeypatch, "Fetch", what)
    async with worker_pair() as pair:
        await compute(pair, pair.a, PROMPT)
        cached = await compute(pair, pair.b, PROMPT, pair.a.incarnation)
        assert cached == len(PREFIX), "the blocks are there, whatever became of the answer"
        assert pair.b.worker.fetcher.num_fetched == NUM_BLOCKS
        assert mishap.num_calls == 1
        with suppress(ServingError):
            await mishap.come_late()
        await lets_go(pair)
