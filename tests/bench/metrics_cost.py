"""What metrics and request lines cost: the same service with and without them, in turns, in one process.

    .venv/bin/python tests/bench/metrics_cost.py --streams 48 --tokens 128 --rounds 12

A router and a worker with a runner that computes nothing and a store in memory, so that all time is the service's own.
"On" counts everything, logs each request's line to a file, and is scraped at both programs twice a round; "off" has
all counting replaced by functions that do nothing. A figure is the processor time of the whole process per token, so
that other programs on the machine disturb it less; both of a pair run right after each other.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from gpu_worker.engine.step_times import StepTimes
from gpu_worker.serving.process.listener import Listener
from gpu_worker.serving.process.worker import Worker
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.client import AsyncClient
from octavo.metrics.value import Histogram
from octavo.process import telemetry
from octavo.request.ids import new_incarnation
from octavo.request.sampling import SamplingParams
from octavo.settings.router import RouterSettings
from octavo.settings.worker import WorkerSettings
from octavo.store.memory import MemoryState, MemoryStore
from router.program import Router
from router.streaming.request_progress import ProgressRegistry, RequestProgress


@contextmanager
def nothing_counted() -> Iterator[None]:
    """Replaces all that was added for metrics and request lines."""

    def ignore(*_: object, **__: object) -> None: ...

    def count_step(times: StepTimes, plan_s: float, run_s: float, commit_s: float, tokens: int, branches: int) -> None:
        times.num_steps += 1
        if tokens:
            times._recent.append(plan_s + run_s + commit_s)

    replaced = {
        Histogram: ("observe",),
        RequestProgress: ("note_owner", "note_record", "note_tokens"),
        ProgressRegistry: ("begin", "end"),
    }
    patches = [mock.patch.object(cls, name, ignore) for cls, names in replaced.items() for name in names]
    patches.append(mock.patch.object(StepTimes, "count_step", count_step))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


async def cpu_per_token(client: AsyncClient, streams: int, tokens: int, scraped: list[object]) -> float:
    """Microseconds of processor time per token of `streams` requests at once."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    began = time.process_time()
    running = [client.complete([1 + i, 2, 3], params) for i in range(streams)]
    for exporter in scraped * 2:
        exporter.expose()
    done = await asyncio.gather(*running)
    spent = time.process_time() - began
    return 1e6 * spent / sum(each.usage.output_tokens for each in done)


async def measure(args: argparse.Namespace) -> None:
    state = MemoryState()
    worker_settings = WorkerSettings(
        listen="127.0.0.1:0", web_listen="", worker_id="w", max_batch_sequences=args.streams
    )
    listener = Listener(worker_settings)
    await listener.open()
    worker = Worker(worker_settings, listener, MemoryStore(state), FakeRunner(num_blocks=4096))
    worker.start()
    settings = RouterSettings(listen="127.0.0.1:0", admin_listen="", web_listen="")
    router = Router(settings, MemoryStore(state), b"s" * 32, new_incarnation())
    await router.start()
    exporters = [router.web_app.exporter, listener.web_app.exporter]
    pairs: list[tuple[float, float]] = []
    async with AsyncClient(router.endpoint) as client:
        while not any(link.view().available for link in router.pool.links.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await cpu_per_token(client, args.streams, args.tokens, exporters)  # warms up
        for number in range(args.rounds):
            figures = {}
            for on in (True, False) if number % 2 else (False, True):
                if on:
                    figures[on] = await cpu_per_token(client, args.streams, args.tokens, exporters)
                else:
                    with nothing_counted():
                        figures[on] = await cpu_per_token(client, args.streams, args.tokens, [])
            pairs.append((figures[True], figures[False]))
            print(f"round {number:2}: on {figures[True]:7.2f} us, off {figures[False]:7.2f} us per token", flush=True)
    await router.stop()
    await worker.stop()
    ratios = sorted(on / off for on, off in pairs)
    quarter = len(ratios) // 4
    least_on, least_off = (min(pair[which] for pair in pairs) for which in (0, 1))
    middle = ratios[quarter : len(ratios) - quarter]
    print(
        f"processor time per token, on / off: median {statistics.median(ratios):.4f}, "
        f"middle half {middle[0]:.4f} to {middle[-1]:.4f} ({args.streams} streams, {args.tokens} tokens, "
        f"{args.rounds} rounds)"
    )
    ratio = least_on / least_off
    print(f"least of all rounds: on {least_on:.2f} us, off {least_off:.2f} us per token, ratio {ratio:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    with open(os.devnull, "w") as nowhere:
        telemetry.configure("bench", form="json", stream=nowhere)
        asyncio.run(measure(args))


if __name__ == "__main__":
    main()
