"""Times to the first token from a worker that has just started, warmed up or not, beside those of one that was there.

    python tests/bench/warm_up.py [--prefixes 16] [--prefix-tokens 512] [--rate 2] [--seconds 60]

One router and one worker serve short answers to prompts that share a few prefixes. Once that is steady, a second worker
starts, first one that fetches what the first one uses most, later one that does not, and the first one is emptied, so
that the new worker alone gets what comes in its first seconds.

Goal: the p50 of the time to the first token in a warmed worker's first minute at most 1.3 times the steady one.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time

from _service import describe_machine, free_port, start
from migration import VOCABULARY, Cell, cell

from octavo.request.sampling import SamplingParams
from octavo.v1 import admin_pb2

OWN_TOKENS = 16  # of each prompt, after its prefix
ANSWER_TOKENS = 8


class Traffic:
    """Requests at a rate, each with one of a few prefixes. Open loop: a slow answer delays no later request."""

    def __init__(self, cell: Cell, args: argparse.Namespace) -> None:
        self._cell, self._rate = cell, args.rate
        self._rng = random.Random(args.seed)
        self._prefixes = [self._tokens(args.prefix_tokens) for _ in range(args.prefixes)]

    async def run(self, seconds: float) -> list[float]:
        """The times to the first token of the requests that came within these seconds, in ms."""
        begun, ended = [], time.perf_counter() + seconds
        while time.perf_counter() < ended:
            begun.append(asyncio.create_task(self._request()))
            await asyncio.sleep(self._rng.expovariate(self._rate))
        return await asyncio.gather(*begun)

    async def _request(self) -> float:
        prompt = [*self._rng.choice(self._prefixes), *self._tokens(OWN_TOKENS)]
        params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        began, first = time.perf_counter(), 0.0
        async for event in self._cell.client.generate(prompt, params):
            if event.token_ids and not first:
                first = time.perf_counter()
        return 1000 * (first - began)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, VOCABULARY) for _ in range(count)]


async def set_draining(cell: Cell, worker_id: str, *, undo: bool = False) -> None:
    request = admin_pb2.DrainWorkerRequest(worker_id=worker_id, undo=undo, grace_ms=60_000)
    async for _ in cell.admin.DrainWorker(request):
        pass


async def first_minute(
    cell: Cell, traffic: Traffic, name: str, worker: list[str], seconds: float
) -> tuple[float, list[float]]:
    """Starts a worker, gives it all that comes, and ends it: how long it took to serve, and its first times."""
    began = time.perf_counter()
    process = await start(
        sys.executable, "-m", "gpu_worker", "--listen", f"127.0.0.1:{free_port()}", "--worker-id", name, *worker
    )
    try:
        async with asyncio.timeout(120):
            while not any(each.worker_id == name and each.available for each in await cell.workers()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        ready_s = time.perf_counter() - began
        await set_draining(cell, "w0")
        times = await traffic.run(seconds)
        await set_draining(cell, "w0", undo=True)
    finally:
        process.terminate()
        await process.wait()
    return ready_s, times


async def main(args: argparse.Namespace) -> None:
    print(describe_machine())
    common = ["--model", args.model, "--threads", "1", "--kv-cache-bytes", args.kv_cache_bytes]
    async with cell(common, names=("w0",)) as made:
        traffic = Traffic(made, args)
        await traffic.run(args.seconds / 2)
        steady = statistics.median(await traffic.run(args.seconds))
        print(f"steady: p50 {steady:.1f} ms")
        for name, warm_up_ms in (("warmed", 10_000), ("cold", 0)):
            worker = [*common, "--store", made.url, "--log-level", "error", "--warm-up-ms", str(warm_up_ms)]
            ready_s, times = await first_minute(made, traffic, name, worker, args.seconds)
            p50 = statistics.median(times)
            print(f"{name}: serves after {ready_s:.1f} s; in its first {args.seconds:.0f} s p50 {p50:.1f} ms, ", end="")
            print(
                f"{p50 / steady:.2f} of the steady one; first ten p50 {statistics.median(times[:10]):.1f} ms",
                flush=True,
            )
            await traffic.run(5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefixes", type=int, default=16)
    parser.add_argument("--prefix-tokens", type=int, default=512)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-cache-bytes", default="2GiB", help="of each worker")
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(main(parser.parse_args()))
