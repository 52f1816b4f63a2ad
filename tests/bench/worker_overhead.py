"""What a worker does around its runner: CPU microseconds per token outside the model, and what the journal costs.

    python tests/bench/worker_overhead.py [--streams 1 16 48] [--step-ms 5 20] [--seconds 4] [--rounds 3]

A whole worker in one process (engine, journal, streams, gRPC) whose runner only waits, as for a device; its reader,
which does what a router's Step stream does, is a process of its own, and so is the store (a private Valkey). Journal on
and off alternate; medians of several rounds. `p99` is of the time between two messages at the reader.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_worker.serving.process.listener import Listener
from gpu_worker.serving.process.worker import Worker
from gpu_worker.steps.runner import StepOutput
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.local.embedded import EmbeddedStore
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import NewSequence
from octavo.request.sampling import SamplingParams
from octavo.settings.worker import WorkerSettings
from octavo.store import open_store
from octavo.store.calls import QueueLimits, TakeReason, TakeRequest
from octavo.store.memory import MemoryStore
from octavo.wire.channel import open_channel
from octavo.wire.public import sampling_to_wire

PROMPT = list(range(1, 101))
MAX_TOKENS = 100_000
WARM_S = 1.0


class Waiting(FakeRunner):
    """The same token again and again, each step after `step_s`: a device computes, the process has nothing to do."""

    def run(self, step: StepInput) -> StepOutput:
        if self.step_s:
            time.sleep(self.step_s)
        return StepOutput([7] * len(step.sample_tokens))


def read_steps(endpoint: str, count: Any, stop: Any, p99_ms: Any) -> None:
    """A router, as far as the worker can see: opens a stream, grants, reads."""

    async def main() -> None:
        times = []
        async with open_channel(endpoint, internal=True) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Step()
            await call.write(worker_pb2.StepRequest(open=worker_pb2.Open(router_id="bench")))
            await call.write(worker_pb2.StepRequest(grant=worker_pb2.Grant()))
            while not stop.value:
                count.value += sum(len(item.token_ids) for item in (await call.read()).items)
                times.append(time.perf_counter())
            call.cancel()
        gaps = sorted(later - earlier for earlier, later in pairwise(times[len(times) // 4 :]))
        p99_ms.value = 1e3 * gaps[int(0.99 * len(gaps))]

    asyncio.run(main())


async def measure(
    url: str, streams: int, step_ms: float, journal: bool, seconds: float, append_tokens: int
) -> tuple[float, ...]:
    """(tokens/s at the reader, CPU microseconds per token of the worker's process, ms per step, p99 in ms)."""
    settings = WorkerSettings(
        speculation="off",  # every token here would be a right guess
        listen="127.0.0.1:0",
        web_listen="",
        runner="fake",
        max_batch_sequences=streams,
        journal="strict" if journal else "off",
        append_tokens=append_tokens,
    )
    store: Any = open_store(url) if journal else MemoryStore()
    await store.open()
    listener = Listener(settings)
    await listener.open()
    runner = Waiting(num_blocks=streams * 7000, context_tokens=200_000, step_s=step_ms / 1000)
    worker = Worker(settings, listener, store, runner)
    worker.start()
    context = multiprocessing.get_context("spawn")
    count, stop, p99_ms = (context.Value(kind, 0, lock=False) for kind in "qbd")
    reader = context.Process(target=read_steps, args=(listener.endpoint, count, stop, p99_ms), daemon=True)
    reader.start()
    while "bench" not in worker.publisher._routers:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await schedule(store, listener, streams, journal)
    await asyncio.sleep(WARM_S)
    times, began, tokens, cpu = worker.engine.times, time.perf_counter(), count.value, time.process_time()
    steps = times.num_steps
    await asyncio.sleep(seconds)
    elapsed, told, cpu = time.perf_counter() - began, count.value - tokens, time.process_time() - cpu
    per_step = 1e3 * elapsed / max(1, times.num_steps - steps)
    stop.value = 1
    while reader.is_alive():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await worker.stop()
    await store.close()
    return told / elapsed, 1e6 * cpu / max(1, told), per_step, p99_ms.value


async def schedule(store: Any, listener: Listener, streams: int, journal: bool) -> None:
    admissions = []
    for number in range(streams):
        seq_id = SequenceId(os.urandom(16).hex())
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, best_of=1, seed=0, ignore_eos=True)
        if journal:
            new = NewSequence(
                seq_id=seq_id, request_id=f"r{number}", body_hash=b"", tenant="bench", salt="", model="m", layout="l",
                sampling=b"", prompt=PROMPT, prompt_chain=0, num_branches=1, max_tokens=MAX_TOKENS, priority=3,
                deadline_in_ms=0, keep_on_disconnect=True, router=Incarnation("bench"),
            )  # fmt: skip
            await store.accept(new, QueueLimits(10**6, 10**12))
            await store.take_ownership(TakeRequest(seq_id, 0, listener.incarnation, "bench", TakeReason.QUEUED))
        item = worker_pb2.Admission(seq_id=seq_id, epoch=1, priority=3, sampling=sampling_to_wire(params))
        item.prompt.ids.extend([1 + number, *PROMPT[1:]])
        admissions.append(item)
    async with open_channel(listener.endpoint, internal=True) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        await stub.Schedule(worker_pb2.ScheduleRequest(router_id="bench", admissions=admissions))


async def main(options: argparse.Namespace) -> None:
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print("streams  step ms  journal   tokens/s  cpu us/token  ms/step  p99 ms")
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedStore(Path(directory))
        await server.start()
        for step_ms in options.step_ms:
            for streams in options.streams:
                sides: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
                for _ in range(options.rounds):
                    for journal in sides:
                        figures = await measure(
                            server.url, streams, step_ms, journal, options.seconds, options.append_tokens
                        )
                        sides[journal].append(figures)
                for journal, rounds in sides.items():
                    rate, cpu, step, p99 = (statistics.median(each) for each in zip(*rounds, strict=True))
                    name = "on" if journal else "off"
                    print(f"{streams:7d} {step_ms:8.1f} {name:>8} {rate:10.0f} {cpu:13.1f} {step:8.2f} {p99:7.2f}")
                off, on = (statistics.median(r[0] for r in sides[side]) for side in (False, True))
                print(f"{'':7} {'':8} lost to the journal: {100 * (1 - on / off):.1f} %", flush=True)
        await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 48])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 20.0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--append-tokens", type=int, default=4, help="1: no token waits for others of its stream")
    asyncio.run(main(parser.parse_args()))
