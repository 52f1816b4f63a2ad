"""`python -m gpu_worker` as others see it: ports, signals, exit codes."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from accepted import accepted_sequence
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import until

from gpu_worker.serving.process.progress_monitor import HANG_STATUS
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.local.embedded import EmbeddedStore
from octavo.local.ports import pick
from octavo.request.ids import SequenceId
from octavo.request.record import Record, SequenceState
from octavo.request.sampling import SamplingParams
from octavo.store import open_store
from octavo.store.base import Store
from octavo.store.calls import QueueLimits, TakeReason, TakeRequest
from octavo.wire.public import sampling_to_wire

SEQ = SequenceId("a" * 32)


class Process:
    """`python -m gpu_worker` as `octavo up` starts it."""

    def __init__(self, root: Path, log: Path, store: str, *arguments: str) -> None:
        self.endpoint = f"127.0.0.1:{pick(1)[0]}"
        self.log = log
        command = [sys.executable, "-m", "gpu_worker", "--listen", self.endpoint, "--store", store, *arguments]
        command += ["--web-listen", ""]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=root, stdout=out, stderr=out)

    async def health(self) -> int:
        async with grpc.aio.insecure_channel(self.endpoint) as channel:
            try:
                return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status
            except grpc.aio.AioRpcError:
                return -1

    async def serving(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return await self.health() == health_pb2.HealthCheckResponse.SERVING

    async def listening(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return await self.health() == health_pb2.HealthCheckResponse.NOT_SERVING

    async def exit_code(self, seconds: float = 20.0) -> int:
        try:
            await until(lambda: self.process.poll() is not None, seconds)
        except TimeoutError:
            raise AssertionError(f"it has not ended: {self.log.read_text()}") from None
        return self.process.returncode


@pytest.fixture
def start(root: Path, tmp_path: Path):
    started: list[Process] = []

    def launch(store: str, *arguments: str) -> Process:
        started.append(Process(root, tmp_path / f"worker{len(started)}.log", store, "--runner", "fake", *arguments))
        return started[-1]

    yield launch
    for each in started:
        each.process.kill()
        each.process.wait()


@asynccontextmanager
async def running(
    worker: Process, seq_id: SequenceId, epoch: int, prompt: Sequence[int], max_tokens: int = 4000
) -> AsyncIterator[None]:
    """A sequence that was scheduled on the worker, which may run steps, until the context ends."""
    async with grpc.aio.insecure_channel(worker.endpoint) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        item = worker_pb2.Admission(seq_id=seq_id, epoch=epoch, priority=3)
        params = SamplingParams(max_tokens=max_tokens, best_of=1, seed=0, ignore_eos=True)
        item.sampling.CopyFrom(sampling_to_wire(params))
        item.prompt.ids.extend(prompt)
        await stub.Schedule(worker_pb2.ScheduleRequest(admissions=[item]))
        call = stub.Step()
        await call.write(worker_pb2.StepRequest(grant=worker_pb2.Grant(steps=0)))
        yield


async def test_a_worker_process_from_no_store_to_the_end(start, tmp_path):
    """It waits for the store, serves, ends during a step on SIGTERM; a second one hangs, and gives up by itself."""
    server = EmbeddedStore(tmp_path)
    worker = start(server.url, "--step-delay-ms", "300")
    hanging = start(server.url, "--step-delay-ms", "60000", "--lease-ms", "500")
    early = start(server.url)
    await until(worker.listening)
    await until(early.listening)
    early.process.send_signal(signal.SIGTERM)
    assert await early.exit_code() == 0, early.log.read_text()
    await server.start()
    store = open_store(server.url)
    await store.open()
    await until(worker.serving)
    await until(hanging.serving)
    await until(lambda: are_members(store, worker, hanging))
    for each in (worker, hanging):
        async with running(each, SEQ, 1, (1, 2, 3), max_tokens=9):
            await asyncio.sleep(0.1)
    worker.process.send_signal(signal.SIGTERM)
    await until(hanging.listening)  # not serving any more, by its own clock: its lease ends moments later
    assert await worker.exit_code() == 0, worker.log.read_text()
    await until(lambda: are_members(store))
    assert await hanging.exit_code() == HANG_STATUS
    assert "gives up" in hanging.log.read_text()
    await store.close()
    await server.stop()


async def are_members(store: Store, *workers: Process) -> bool:
    """Whether these and no others have a lease."""
    members = [json.loads(each.info)["endpoint"] for each in await store.members("worker")]
    return sorted(members) == sorted(each.endpoint for each in workers)


async def test_a_second_sigterm_ends_the_only_worker_at_once(start, server):
    """After the first one it goes on with its sequence, as nobody else could."""
    patient = ("--lease-ms", "600000", "--drain-ms", "600000")  # on a busy machine, too, the last signal ends it
    worker = start(server.url, "--step-delay-ms", "50", *patient)
    await until(worker.serving)
    store = open_store(server.url)
    await store.open()
    (member,) = await store.members("worker")
    new = accepted_sequence(max_tokens=4000)
    await store.accept(new, QueueLimits())
    taken = await store.take_ownership(TakeRequest(new.seq_id, 0, member.id, "take", TakeReason.QUEUED))

    async def record() -> Record:
        return (await store.read(new.seq_id)).record

    async with running(worker, new.seq_id, taken.epoch, new.prompt):
        before = sum((await record()).num_tokens)
        worker.process.send_signal(signal.SIGTERM)
        await until(worker.listening)  # two signals that nobody has waited for between them may be one

        async def goes_on() -> bool:
            return sum((await record()).num_tokens) > before + 5

        await until(goes_on)
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.exit_code(40) == 0, worker.log.read_text()
    last = await record()
    await store.close()
    if "sequences wait until it is told" in worker.log.read_text():  # the store took longer than a person waits
        assert last.crashes == 0
    else:
        assert (last.state, last.epoch, last.crashes) == (SequenceState.QUEUED, 2, 0)


@pytest.fixture
async def server(tmp_path):
    server = EmbeddedStore(tmp_path)
    await server.start()
    yield server
    await server.stop()


@pytest.mark.timeout(240)
async def test_a_worker_that_slept_while_another_got_its_id_ends_and_says_why(start, server):
    named = ("--worker-id", "pod-0")
    sleeper = start(server.url, *named)
    await until(sleeper.serving)
    sleeper.process.send_signal(signal.SIGSTOP)
    other = start(server.url, *named)
    await until(other.serving, 20)
    sleeper.process.send_signal(signal.SIGCONT)
    assert await sleeper.exit_code() == 1
    assert f"worker_id pod-0: the worker at {other.endpoint} (" in sleeper.log.read_text()
    await until(other.serving)
