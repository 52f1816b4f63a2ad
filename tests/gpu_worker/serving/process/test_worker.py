"""A worker's life: its lease and health follow the step loop, and it leaves when it ends."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from accepted import accepted_sequence
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import until

from gpu_worker.serving.leaving import releaser
from gpu_worker.serving.process import program, progress_monitor
from gpu_worker.serving.process.listener import Listener
from gpu_worker.serving.process.worker import Worker
from gpu_worker.steps.rank_state import RankState
from gpu_worker.steps.runner import StepOutput
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.internal.v1 import transfer_pb2, transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from octavo.request.errors import CannotMove
from octavo.request.ids import SequenceId
from octavo.request.record import SequenceState
from octavo.request.sampling import SamplingParams
from octavo.settings.worker import WorkerSettings
from octavo.store.calls import QueueLimits, TakeReason, TakeRequest
from octavo.store.memory import MemoryStore
from octavo.wire import statuses
from octavo.wire.channel import open_channel
from octavo.wire.public import sampling_to_wire

SEQ = SequenceId("a" * 32)
LEASE_MS = 300


class Stubborn(FakeRunner):
    """A model whose steps can be made to hang."""

    def __init__(self) -> None:
        super().__init__(step_s=0.001)
        self.go = threading.Event()
        self.go.set()
        self.hangs = threading.Event()
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def run(self, step: StepInput, *further) -> StepOutput:
        if not self.go.is_set():
            self.hangs.set()
        self.go.wait(30)
        return super().run(step, *further)


class Life:
    """A worker in this process, on a store in this process."""

    def __init__(self, **settings) -> None:
        self.settings = WorkerSettings(
            listen="127.0.0.1:0", web_listen="", lease_ms=LEASE_MS, runner="fake", **settings
        )
        self.store = MemoryStore()
        self.runner = Stubborn()
        self.ended: list[str] = []

    async def begin(self) -> None:
        self.listener = Listener(self.settings)
        await self.listener.open()
        self.channel = open_channel(self.listener.endpoint, internal=True)
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)
        await self.store.open()
        self.worker = Worker(self.settings, self.listener, self.store, self.runner)
        self.worker.start()

    async def end(self) -> None:
        self.runner.go.set()
        await self.worker.stop()
        await self.channel.close()

    async def serving(self) -> bool:
        health = health_pb2_grpc.HealthStub(self.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="octavo.internal.v1.Worker"))
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def known(self) -> bool:
        return bool(await self.store.members("worker"))

    async def run_something(self, max_tokens: int = 5000, *, scheduled: bool = True, steps: int = 0) -> None:
        """A sequence that runs for so many steps; 0: to its end."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, best_of=1, seed=0, ignore_eos=True)
        new = accepted_sequence((1, 2, 3), params, seq_id=SEQ, keep_on_disconnect=True)
        await self.store.accept(new, QueueLimits())
        taken = await self.store.take_ownership(TakeRequest(SEQ, 0, self.listener.incarnation, "t", TakeReason.QUEUED))
        if not scheduled:
            return
        item = worker_pb2.Admission(seq_id=SEQ, epoch=taken.epoch, priority=3, sampling=sampling_to_wire(params))
        item.prompt.ids.extend([1, 2, 3])
        await self.stub.Schedule(worker_pb2.ScheduleRequest(admissions=[item]))
        self.worker.engine.control.grant_steps(steps)

    async def tokens(self) -> int:
        snapshot = await self.store.read(SEQ, from_indexes=[0])
        return len(snapshot.outputs[0])

    async def until_in_state(self, state: SequenceState) -> None:
        async def is_there() -> bool:
            return (await self.store.read(SEQ)).record.state is state

        await until(is_there)

    async def until_it_runs(self) -> None:
        """Some tokens of a sequence are journalled."""
        await self.run_something()

        async def has_tokens() -> bool:
            return await self.tokens() > 5

        await until(has_tokens)

    async def until_it_hangs(self) -> None:
        await self.until_it_runs()
        self.runner.go.clear()
        await until(self.runner.hangs.is_set)


@pytest.fixture
async def life(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Life]:
    made = Life()
    monkeypatch.setattr(progress_monitor, "give_up", made.ended.append)
    monkeypatch.setattr(progress_monitor, "HANG_LEASES", 4)
    monkeypatch.setattr(releaser, "STORE_PATIENCE_S", 0.5)
    await made.begin()
    yield made
    await made.end()


async def not_(condition) -> bool:
    return not await condition()


async def test_whoever_waits_for_its_end_waits_neither_for_a_step_nor_for_the_store(life):
    await life.until_it_hangs()
    urgent = asyncio.Event()
    urgent.set()
    async with asyncio.timeout(20):
        await life.worker.leave(urgent)
        assert not await life.worker.stop()  # the step still runs
    record = (await life.store.read(SEQ)).record
    assert (record.state, record.epoch, record.crashes) == (SequenceState.QUEUED, 2, 0)


async def test_tokens_gather_as_the_settings_say():
    life, sizes = Life(append_branches=1, append_tokens=4, append_delay_ms=5000), []
    append_batch = life.store.append_batch

    async def counted(owner, items):
        sizes.extend(len(item.token_ids) for item in items)
        return await append_batch(owner, items)

    life.store.append_batch = counted
    await life.begin()
    await life.run_something(max_tokens=41, steps=1)
    await until(lambda: sizes)  # the first token does not wait for others
    life.worker.engine.control.grant_steps(0)
    await life.until_in_state(SequenceState.DONE)
    await life.end()
    assert (sum(sizes), sizes[0]) == (41, 1)
    assert len(sizes) <= 12  # ten of four tokens, and the end; more in one where the store was slow


async def test_each_rank_has_a_service_in_health_and_its_metrics(life):
    states = [RankState(rank=number, host="h", pid=number, memory_bytes=7) for number in range(2)]
    life.worker.watch.ranks = lambda: states
    await until(lambda: life.listener.health.is_serving("rank/1"))
    values = {value.name: value.value for value in life.worker.metrics.values() if value.labels == ("1",)}
    assert values["octavo_rank_memory_bytes"] == 7
    states[1] = replace(states[1], silent_s=1.0)
    await until(lambda: not life.listener.health.is_serving("rank/1"))
    assert life.listener.health.is_serving("rank/0")


async def test_a_loop_that_hangs_loses_lease_and_health_and_in_the_end_the_process(life):
    await until(life.serving)
    await life.until_it_runs()
    life.runner.go.clear()
    began = time.monotonic()
    await until(lambda: not_(life.known))
    await until(lambda: not_(life.serving))
    assert not life.ended  # not yet: others may go on meanwhile
    await until(lambda: life.ended)
    assert time.monotonic() - began >= progress_monitor.HANG_LEASES * LEASE_MS / 1000
    assert "hangs" in life.ended[0]


async def test_a_runner_is_closed_after_its_last_step_only(life):
    await life.until_it_hangs()
    life.worker.step_timeout_s = 0.05
    await program.end_worker(life.worker, life.store, life.runner)
    assert not life.runner.closed
    assert "step in flight" in life.ended[0]
    life.runner.go.set()
    life.worker.step_timeout_s = 10.0
    await program.end_worker(life.worker, life.store, life.runner)
    assert life.runner.closed
    assert len(life.ended) == 1


async def test_a_scheduler_that_fails_ends_the_process(life):
    await until(life.serving)
    life.worker.scheduler.plan = lambda: 1 // 0
    life.worker.engine.control.grant_steps(1)
    await until(lambda: life.ended)
    assert "loop" in life.ended[0]


@pytest.mark.parametrize("settings", [{"prefix_caching": False}, {"journal": "off"}])
async def test_without_prefix_cache_or_journal_it_takes_no_blocks(settings):
    life = Life(**settings)
    await life.begin()
    with pytest.raises(CannotMove, match="takes no blocks"), statuses.serving_errors():
        await transfer_pb2_grpc.TransferStub(life.channel).Prepare(
            transfer_pb2.PrepareRequest(seq_id=SEQ, epoch=1, number=1, source="s")
        )
    await life.end()
