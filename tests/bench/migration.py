"""What a client notices of a live migration, against the length of the context, beside a recompute; and a drain.

    python tests/bench/migration.py [--contexts 512,1024,2048,4096,8192] [--rounds 10] [--drain 64] [--model smollm2]
    python tests/bench/migration.py --runner witness --step-ms 8 --contexts 512,2048 --rounds 3 --drain 16

One router and two workers. A stream runs; its sequence moves to the other worker, by Admin.Migrate or by a take and a
Schedule there, as a failover does it once it knows. The gap is the longest time between two events of the stream from
the call on; the first of the two is the last one from the old worker. Every round has a prompt of its own, so neither
worker has a block of it in its cache. Then as many streams as --drain says run on one worker, which is drained.

Goals: gap p99 at most a step + 50 ms, at most 100 ms, flat within 20 % over the contexts; 64 sequences in 10 s.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from _service import describe_machine, free_port, start, until_ready

from octavo.client import AsyncClient
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.local.embedded import EmbeddedStore
from octavo.request.ids import Incarnation, SequenceId, new_operation_id
from octavo.request.limits import MAX_N
from octavo.request.sampling import SamplingParams
from octavo.store import open_store
from octavo.store.base import Store
from octavo.store.calls import TakeReason, TakeRequest, TakeStatus
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.wire.channel import open_channel
from octavo.wire.internal import admission_to_wire, answer_from_wire

BEFORE, AFTER = 24, 24  # tokens of the stream before the call, and after its answer
MAX_TOKENS = 3000  # of a stream that a drain moves: a full target takes nobody before one of its own has ended
VOCABULARY = 900  # token ids of prompts: every runner has these


@dataclass(slots=True)
class Cell:
    """One router and its workers."""

    url: str  # of the store
    client: AsyncClient
    admin: admin_pb2_grpc.AdminStub
    store: Store

    async def workers(self) -> list[admin_pb2.WorkerStatus]:
        return list((await self.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers)

    async def find(self, request_id: str) -> admin_pb2.SequenceStatus:
        listed = await self.admin.ListSequences(admin_pb2.ListSequencesRequest())
        return next(each for each in listed.sequences if each.request_id == request_id)


@dataclass(slots=True)
class TimedStream:
    """A stream with the time of each of its events."""

    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0

    async def read(self, client: AsyncClient, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        async for event in client.generate(list(prompt), params, request_id=request_id):
            self.arrivals.append(time.perf_counter())
            self.num_tokens += len(event.token_ids)

    async def until(self, num_tokens: int) -> None:
        async with asyncio.timeout(600):
            while self.num_tokens < num_tokens:  # noqa: ASYNC110  another task reads
                await asyncio.sleep(0.001)

    def gap_ms(self, since: float) -> float:
        """The longest time between two events, from the last one before `since` on."""
        first = max((i for i, at in enumerate(self.arrivals) if at <= since), default=0)
        late = self.arrivals[first:]
        return 1000 * max(b - a for a, b in pairwise(late))

    def step_ms(self, until: float) -> float:
        early = [at for at in self.arrivals if at <= until]
        return 1000 * statistics.median(b - a for a, b in pairwise(early))


@asynccontextmanager
async def cell(worker_args: Sequence[str], names: Sequence[str] = ("w0", "w1")) -> AsyncIterator[Cell]:
    with tempfile.TemporaryDirectory() as folder:
        embedded = EmbeddedStore(Path(folder))
        await embedded.start()
        port, admin_port = free_port(), free_port()
        common = ["--store", embedded.url, "--web-listen", "", "--log-level", "error"]
        listen = ["--listen", f"127.0.0.1:{port}", "--admin-listen", f"127.0.0.1:{admin_port}", "--http-listen", ""]
        commands = [["-m", "router", *listen, *common]]
        for name in names:
            listen = ["--listen", f"127.0.0.1:{free_port()}", "--worker-id", name]
            commands.append(["-m", "gpu_worker", *listen, *common, *worker_args])
        processes = [await start(sys.executable, *command) for command in commands]
        store = open_store(embedded.url)
        await store.open()
        try:
            async with AsyncClient(f"127.0.0.1:{port}") as client, open_channel(f"127.0.0.1:{admin_port}") as channel:
                made = Cell(embedded.url, client, admin_pb2_grpc.AdminStub(channel), store)
                await until_ready(client, 300)
                async with asyncio.timeout(300):
                    while sum(worker.available for worker in await made.workers()) < len(names):  # noqa: ASYNC110
                        await asyncio.sleep(0.2)
                yield made
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                await process.wait()
            await store.close()
            await embedded.stop()


async def migrate(cell: Cell, request_id: str) -> admin_pb2.MigrateResponse:
    return await cell.admin.Migrate(admin_pb2.MigrateRequest(request_id=request_id))


async def recompute(cell: Cell, request_id: str) -> admin_pb2.MigrateResponse:
    """Takes the sequence for the other worker, which computes prompt and output again."""
    found = await cell.find(request_id)
    seq_id = SequenceId(found.seq_id)
    other = next(worker for worker in await cell.workers() if worker.incarnation != found.owner)
    target, take_id = Incarnation(other.incarnation), new_operation_id()
    taken = await cell.store.take_ownership(TakeRequest(seq_id, found.epoch, target, take_id, TakeReason.REFUSED))
    snapshot = await cell.store.read(seq_id, prompt=True, from_indexes=[0] * MAX_N)
    if taken.status is not TakeStatus.OK or snapshot is None:
        raise SystemExit(f"the sequence was not taken: {taken.status}")
    snapshot = replace(snapshot, outputs=snapshot.outputs[: snapshot.record.num_branches])
    admission = admission_to_wire(snapshot, epoch=taken.epoch, alone=False, age_ms=0)
    async with open_channel(other.endpoint, internal=True) as channel:
        request = worker_pb2.ScheduleRequest(admissions=[admission])
        response = await worker_pb2_grpc.WorkerStub(channel).Schedule(request)
    if not answer_from_wire(response.results[0]).admitted:
        raise SystemExit(f"not admitted: {response.results[0]}")
    return admin_pb2.MigrateResponse()


async def measure(cell: Cell, how: object, name: str, context: int, rng: random.Random) -> tuple[float, float, object]:
    """One stream with one change of worker: the gap and the usual step in ms, and what was answered."""
    prompt = [rng.randrange(3, VOCABULARY) for _ in range(context - BEFORE)]
    stream = TimedStream()
    reading = asyncio.create_task(stream.read(cell.client, name, prompt, 10_000))
    await stream.until(BEFORE)
    began = time.perf_counter()
    answer = await how(cell, name)  # type: ignore[operator]
    here = stream.num_tokens
    await stream.until(here + AFTER)
    await cell.client.cancel(name)
    await asyncio.wait([reading])
    return stream.gap_ms(began), stream.step_ms(began), answer


async def stalls(cell: Cell, contexts: Sequence[int], rounds: int, rng: random.Random) -> None:
    print("\n| context | step | migration: gap p50, max | blocks, KiB | ms in all, stopped | recompute: gap p50, max |")
    print("|---|---|---|---|---|---|", flush=True)
    for context in contexts:
        gaps: dict[str, list[float]] = {"migrate": [], "recompute": []}
        steps, answers = [], []
        for number in range(rounds):
            for how in (migrate, recompute):
                gap, step, answer = await measure(cell, how, f"{how.__name__}-{context}-{number}", context, rng)
                gaps[how.__name__].append(gap)
                steps.append(step)
                if how is migrate:
                    answers.append(answer)
        sent = statistics.median(answer.num_sent_blocks for answer in answers)
        kib = statistics.median(answer.num_sent_bytes for answer in answers) / 1024
        total = statistics.median(answer.total_ms for answer in answers)
        stopped = statistics.median(answer.stopped_ms for answer in answers)
        shown = {name: f"{statistics.median(found):.1f}, {max(found):.1f} ms" for name, found in gaps.items()}
        print(
            f"| {context} | {statistics.median(steps):.1f} ms | {shown['migrate']} | {sent:.0f}, {kib:.0f} "
            f"| {total:.1f}, {stopped:.1f} | {shown['recompute']} |",
            flush=True,
        )


async def drain(cell: Cell, count: int, rng: random.Random) -> None:
    """All streams on one worker, which then gives them all away."""
    first, second = (worker.worker_id for worker in await cell.workers())

    async def set_draining(name: str, undo: bool) -> admin_pb2.DrainWorkerResponse:
        request = admin_pb2.DrainWorkerRequest(worker_id=name, undo=undo, grace_ms=120_000)
        return [progress async for progress in cell.admin.DrainWorker(request)][-1]

    await set_draining(second, undo=False)
    streams = [TimedStream() for _ in range(count)]  # their whole length fits into one worker's pool: see MAX_TOKENS
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(128)] for _ in range(count)]
    readings = [
        asyncio.create_task(stream.read(cell.client, f"drained-{i}", prompt, MAX_TOKENS))
        for i, (stream, prompt) in enumerate(zip(streams, prompts, strict=True))
    ]
    await asyncio.gather(*(stream.until(BEFORE) for stream in streams))
    await set_draining(second, undo=True)
    async with asyncio.timeout(60):
        while not all(worker.available for worker in await cell.workers()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    began = time.perf_counter()
    step = statistics.median(stream.step_ms(began) for stream in streams)
    progress = await set_draining(first, undo=False)
    seconds = time.perf_counter() - began
    counts = [stream.num_tokens for stream in streams]
    await asyncio.gather(*(s.until(n + AFTER) for s, n in zip(streams, counts, strict=True)))
    for number in range(count):
        await cell.client.cancel(f"drained-{number}")
    await asyncio.wait(readings)
    gaps = sorted(stream.gap_ms(began) for stream in streams)
    p99 = gaps[round(0.99 * (len(gaps) - 1))]
    print(
        f"\ndrain of {count} sequences: {seconds:.2f} s, {progress.num_migrated} moved, "
        f"{progress.num_released} released; "
        f"step {step:.1f} ms, longest gap of a stream p50 {statistics.median(gaps):.1f} ms, p99 {p99:.1f} ms"
    )


async def main(args: argparse.Namespace) -> None:
    print(describe_machine())
    contexts = [int(text) for text in args.contexts.split(",")]
    worker = ["--runner", args.runner, "--step-delay-ms", str(args.step_ms), "--max-batch-sequences", str(args.batch)]
    worker += ["--model", args.model] if args.runner == "model" else []
    worker += ["--threads", str(args.threads)] if args.threads else []
    worker += ["--kv-cache-bytes", args.kv_cache_bytes] if args.kv_cache_bytes else []
    rng = random.Random(args.seed)
    async with cell(worker) as made:
        await stalls(made, contexts, args.rounds, rng)
        if args.drain:
            await drain(made, args.drain, rng)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="512,1024,2048,4096")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--drain", type=int, default=64, help="sequences; 0: no drain")
    parser.add_argument("--runner", default="model", choices=("model", "witness", "fake"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--step-ms", type=float, default=0.0, help="how much longer a step takes")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--batch", type=int, default=64, help="--max-batch-sequences of the workers")
    parser.add_argument("--kv-cache-bytes", default="", help="of each worker; room for --drain streams of MAX_TOKENS")
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(main(parser.parse_args()))
