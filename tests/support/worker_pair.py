"""Whole workers of one store in this process, and a reader that follows a sequence wherever it moves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from accepted import accepted_sequence
from waiting import until

from gpu_worker.serving.process.lease import register_worker
from gpu_worker.serving.process.listener import Listener
from gpu_worker.serving.process.worker import Worker, member_of
from gpu_worker.steps.runner import StepOutput
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.witness_runner import WitnessRunner, witness_oracle
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.request import hashing
from octavo.request.ids import SequenceId
from octavo.request.record import Record
from octavo.request.sampling import SamplingParams
from octavo.request.step_item import StepItem
from octavo.settings.worker import WorkerSettings
from octavo.store.calls import QueueLimits, TakeReason, TakeRequest
from octavo.store.memory import MemoryState, MemoryStore
from octavo.wire import statuses
from octavo.wire.channel import open_channel
from octavo.wire.internal import admission_to_wire, item_from_wire

PROMPT = tuple(range(1, 40))
PATIENCE_S = 30.0
QUICK_S, SLOW_S = 0.002, 0.02  # of steps; slow ones are long against what a move takes
MOVED = worker_pb2.MIGRATION_OUTCOME_MOVED
STAYED = worker_pb2.MIGRATION_OUTCOME_STAYED
ENDED = worker_pb2.MIGRATION_OUTCOME_ENDED


class CountingRunner(WitnessRunner):
    """Counts the steps that it runs, and the tokens of prompts in them."""

    num_prefill = 0
    num_steps = 0

    def run(self, step: StepInput, *further) -> StepOutput:
        self.num_prefill += len(step.tokens) - step.num_decodes
        output = super().run(step, *further)
        self.num_steps += bool(step.seats)
        return output


class PairedWorker:
    """A worker with a runner that notices each wrong block, and calls of it."""

    runner_kind: type[CountingRunner] = CountingRunner

    def __init__(
        self, name: str, store: MemoryStore, *, step_s: float = QUICK_S, warms_up: bool = False, **settings: Any
    ) -> None:
        sizes = {"block_size": 4, "num_blocks": 512, "num_host_blocks": 8, "context_tokens": 1024}
        sizes.update({key: settings.pop(key) for key in list(settings) if key in sizes})
        self.store = store
        self._warms_up = warms_up
        self.runner = self.runner_kind(step_s=step_s, **sizes)
        own = {"listen": "127.0.0.1:0", "web_listen": "", "worker_id": name, "runner": "witness", "lease_ms": 2000}
        self._settings = WorkerSettings(**{**own, **settings})

    async def start(self) -> None:
        self.listener = Listener(self._settings)
        await self.listener.open()
        self.worker = Worker(self._settings, self.listener, self.store, self.runner)
        if self._warms_up:
            await register_worker(self.store, member_of(self.listener), 2000)
            await self.worker.warm_up()
        self.worker.start()
        self.incarnation = self.listener.incarnation
        self.channel = open_channel(self.listener.endpoint, internal=True)
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)
        self.worker.engine.control.grant_steps(0)

    async def stop(self) -> None:
        await self.channel.close()
        await self.worker.stop()
        assert not self.runner.mismatches, self.runner.first_mismatch

    async def migrate(
        self, seq_id: str, epoch: int = 1, target: str = "", *, during_prefill: bool = False
    ) -> worker_pb2.WorkerMigrateResponse:
        """What the call answers at its end. Raises ServingErrors."""
        request = worker_pb2.WorkerMigrateRequest(
            seq_id=seq_id, epoch=epoch, target=target, during_prefill=during_prefill
        )
        with statuses.serving_errors():
            async with asyncio.timeout(PATIENCE_S):
                return [each async for each in self.stub.Migrate(request)][-1]

    async def has_let_go(self, seconds: float = 5.0) -> None:
        """Waits until no sequence, pin, ticket or reservation is left here, and recounts all blocks."""
        await until(lambda: not self.worker.publisher.logs, seconds)
        await self.has_no_pins(seconds)

    async def has_no_pins(self, seconds: float = 5.0) -> None:
        """Waits until no pin, ticket or reservation is left here, and recounts all blocks."""
        device = self.worker.workload.tables.device
        await until(lambda: not (device.num_reserved or self.worker.target.num_tickets), seconds)
        await asyncio.wrap_future(self.worker.engine.port.post(lambda scheduler: scheduler.check_state()))


def set_pace(*workers: PairedWorker, slow: bool) -> None:
    """How long steps take from now on. With slow ones a sequence moves before its end on a busy machine, too."""
    for worker in workers:
        worker.runner.step_s = SLOW_S if slow else QUICK_S


class Follower:
    """A reader that is no router: it follows one sequence on a worker, and on the next one after MOVED."""

    def __init__(
        self, store: MemoryStore, workers: dict[str, PairedWorker], seq_id: SequenceId, num_branches: int
    ) -> None:
        self._store = store
        self._workers = workers
        self.seq_id = seq_id
        self.items: list[list[StepItem]] = [[] for _ in range(num_branches)]
        self.owners: list[str] = []
        self.done = asyncio.Event()
        self._ended: set[int] = set()

    def outputs(self) -> list[list[int]]:
        """What was received of each branch, each index once and without a gap."""
        found = []
        for items in self.items:
            tokens: list[int] = []
            for item in items:
                assert item.first_index <= len(tokens), "a gap"
                known = tokens[item.first_index :]
                assert known == list(item.token_ids[: len(known)]), "another token at the same index"
                tokens += item.token_ids[len(known) :]
            found.append(tokens)
        return found

    async def follow(self, owner: str) -> None:
        try:
            while owner:
                self.owners.append(owner)
                owner = await self._follow_at(self._workers[owner])
        finally:
            self.done.set()

    async def _follow_at(self, worker: PairedWorker) -> str:
        call = worker.stub.Step()
        await call.write(worker_pb2.StepRequest(open=worker_pb2.Open(router_id=f"follower-{self.seq_id}")))
        follow = worker_pb2.Follow(seq_id=self.seq_id, next_indexes=[len(tokens) for tokens in self.outputs()])
        await call.write(worker_pb2.StepRequest(follow=follow))
        try:
            while True:
                result = await call.read()
                for message in result.items:
                    item = item_from_wire(message)
                    self.items[item.branch].append(item)
                    if item.finish:
                        self._ended.add(item.branch)
                if len(self._ended) == len(self.items):
                    return ""
                for moved in result.moved:
                    assert moved.seq_id == self.seq_id
                    return moved.owner
                if result.unknown_seq_ids:  # a router reads the journal, too
                    await self._read_journal()
                    return ""
        finally:
            call.cancel()

    async def _read_journal(self) -> None:
        snapshot = await self._store.read(self.seq_id, from_indexes=[0] * len(self.items))
        assert snapshot is not None
        assert snapshot.record.state.ended, "the worker does not say where the sequence went"
        for branch, tokens in enumerate(snapshot.outputs):
            item = StepItem(self.seq_id, snapshot.record.epoch, branch, 0, tokens, 0, snapshot.record.finishes[branch])
            self.items[branch].append(item)


class WorkerPair:
    """Two workers, `a` and `b`, and the store that they share."""

    def __init__(self, store: MemoryStore, **settings: Any) -> None:
        self.store = store
        self.a = PairedWorker("a", store, **settings)
        self.b = PairedWorker("b", store, **settings)
        self.others: list[PairedWorker] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._num_sequences = 0

    @property
    def workers(self) -> dict[str, PairedWorker]:
        return {each.incarnation: each for each in (self.a, self.b, *self.others)}

    async def add(self, name: str, **settings: Any) -> PairedWorker:
        made = PairedWorker(name, self.store, **settings)
        await made.start()
        self.others.append(made)
        await until(self._all_known)
        return made

    async def _all_known(self) -> bool:
        return len(await self.store.members("worker")) == 2 + len(self.others)

    async def run(
        self,
        params: SamplingParams,
        *,
        prompt: tuple[int, ...] = PROMPT,
        num_tokens: int = 9,
        on: PairedWorker | None = None,
        hint: tuple[str, int] = ("", 0),
        **changes: Any,
    ) -> Follower:
        """A sequence that runs on `a` or another worker and has at least so many tokens of each branch.

        The worker is told that another one has so many tokens of the prompt by `hint`.
        """
        worker = on or self.a
        self._num_sequences += 1
        info = self.a.runner.info
        seq_id = SequenceId(f"{self._num_sequences:032x}")
        new = accepted_sequence(prompt, params, model=info.fingerprint, layout=info.layout, **changes)
        new = replace(new, seq_id=seq_id, request_id=f"r{self._num_sequences}")
        await self.store.accept(new, QueueLimits())
        taken = await self.store.take_ownership(
            TakeRequest(seq_id, 0, worker.incarnation, f"t{seq_id}", TakeReason.QUEUED)
        )
        follower = Follower(self.store, self.workers, seq_id, new.num_branches)
        await self.schedule(follower, worker, taken.epoch, hint)

        async def has_tokens() -> bool:
            return min((await self.record(seq_id)).num_tokens) >= num_tokens

        await until(has_tokens, PATIENCE_S)
        return follower

    async def schedule(self, follower: Follower, on: PairedWorker, epoch: int, hint: tuple[str, int]) -> None:
        """What a router does when a worker has become the owner: it schedules the sequence there, and follows it."""
        snapshot = await self.store.read(follower.seq_id, prompt=True, from_indexes=[0] * len(follower.items))
        admission = admission_to_wire(snapshot, epoch=epoch, suspect=False, age_ms=0)
        admission.prefix_owner, admission.prefix_owner_tokens = hint
        answer = await on.stub.Schedule(worker_pb2.ScheduleRequest(admissions=[admission]))
        assert answer.results[0].outcome == worker_pb2.ADMISSION_OUTCOME_ADMITTED, answer
        self.tasks.append(asyncio.create_task(follower.follow(on.incarnation)))

    async def has_let_go(self) -> None:
        """Waits until nothing is left on any worker."""
        for worker in self.workers.values():
            await worker.has_let_go()

    async def check_owner(self, follower: Follower, params: SamplingParams, *, moved: bool) -> None:
        """The sequence is where it should be, both workers let go of all else, and no token of it is wrong."""
        owner = self.b if moved else self.a
        for record in (await self.record(follower.seq_id), await self.check_end(follower, params)):
            found = record.owner, record.epoch, record.mig_to, record.crashes
            assert found == (owner.incarnation, 1 + moved, "", 0)
            for worker in self.workers.values():
                await worker.has_no_pins()
        await self.has_let_go()

    async def record(self, seq_id: SequenceId) -> Record:
        snapshot = await self.store.read(seq_id)
        assert snapshot is not None
        return snapshot.record

    async def check_end(
        self, follower: Follower, params: SamplingParams, *, prompt: tuple[int, ...] = PROMPT
    ) -> Record:
        """Waits for the end, at a quick pace; what was followed is what an undisturbed run gives."""
        set_pace(self.a, self.b, *self.others, slow=False)
        async with asyncio.timeout(PATIENCE_S):
            await follower.done.wait()
        info = self.a.runner.info
        root = hashing.root_key(info.fingerprint, info.layout)
        for branch, output in enumerate(follower.outputs()):
            expected = witness_oracle(prompt, root, params.max_tokens or 0, info=info, params=params, branch=branch)
            assert output == expected, f"branch {branch}"
        return await self.record(follower.seq_id)


def greedy(max_tokens: int = 150, **changes: Any) -> SamplingParams:
    return replace(SamplingParams(temperature=0, max_tokens=max_tokens, best_of=1, seed=1, ignore_eos=True), **changes)


@asynccontextmanager
async def worker_pair(store: MemoryStore | None = None, **settings: Any) -> AsyncIterator[WorkerPair]:
    """Two workers that know each other."""
    store = store or MemoryStore(MemoryState())
    await store.open()
    pair = WorkerPair(store, **settings)
    await pair.a.start()
    await pair.b.start()
    try:
        await until(pair._all_known)
        yield pair
    finally:
        for task in pair.tasks:
            task.cancel()
        await asyncio.gather(*pair.tasks, return_exceptions=True)
        for each in (pair.a, pair.b, *pair.others):
            await each.stop()
