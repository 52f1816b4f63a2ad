"""What moves cost the streams beside them: their inter-token times while others move, and while none does.

    python tests/bench/migration_neighbours.py [--rounds 4] [--neighbours 8] [--movers 8] [--prompt 1000] [--window-s 6]

One router and two workers with a model. Neighbours run on both workers all the time. In each round as many movers
begin, with prompts of their own. Once they all decode two windows follow in random order: in one nothing happens, in
the other every mover goes to the other worker with its blocks, one after the other. So both windows have the same
streams, and about as many on each worker.

Goal: a neighbour's p99 at most 10 % above that of the windows without moves.
"""

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Sequence

from _service import describe_machine
from migration import VOCABULARY, Cell, TimedStream, cell, migrate

from octavo.request.errors import ServingError


async def window(
    cell: Cell, streams: Sequence[TimedStream], movers: Sequence[str], seconds: float
) -> tuple[list[float], int, float]:
    """The inter-token times of the streams in ms within these seconds, the moves done in them, and their megabytes."""
    began, num_moved, num_bytes = time.perf_counter(), 0, 0
    for name in movers:
        if time.perf_counter() - began > seconds:
            break
        answer = await migrate(cell, name)
        num_moved, num_bytes = num_moved + 1, num_bytes + answer.num_sent_bytes
    await asyncio.sleep(max(0.0, began + seconds - time.perf_counter()))
    ended = time.perf_counter()
    gaps = []
    for stream in streams:
        within = [at for at in stream.arrivals if began <= at <= ended]
        gaps += [1000 * (late - early) for early, late in itertools.pairwise(within)]
    return gaps, num_moved, num_bytes / 1e6


def describe(gaps: Sequence[float]) -> str:
    return f"p50 {quantile(gaps, 0.5):.1f}, p99 {quantile(gaps, 0.99):.1f} ms"


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


class Load:
    """Streams with prompts of their own, which run until they are told to end."""

    def __init__(self, cell: Cell, rng: random.Random) -> None:
        self._cell, self._rng = cell, rng
        self._readings: dict[str, asyncio.Task[None]] = {}

    async def begin(self, names: Sequence[str], prompt_tokens: int, max_tokens: int) -> list[TimedStream]:
        """Returns once each has a few tokens. One after the other, so that the router sees what each of them adds."""
        streams = []
        for name in names:
            stream = TimedStream()
            prompt = [self._rng.randrange(3, VOCABULARY) for _ in range(prompt_tokens)]
            self._readings[name] = asyncio.create_task(stream.read(self._cell.client, name, prompt, max_tokens))
            await stream.until(4)
            streams.append(stream)
        return streams

    async def end(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                await self._cell.client.cancel(name)
            except ServingError as error:
                raise SystemExit(f"{name} ended too early: {error.message}") from None
        await asyncio.wait([self._readings.pop(name) for name in names])


async def main(args: argparse.Namespace) -> None:
    print(describe_machine())
    rng = random.Random(args.seed)
    worker = ["--threads", str(args.threads), "--kv-cache-bytes", args.kv_cache_bytes, "--model", args.model]
    found: dict[bool, list[float]] = {False: [], True: []}
    num_moves, megabytes = 0, 0.0
    async with cell(worker) as made:
        load = Load(made, rng)
        names = [f"neighbour-{number}" for number in range(args.neighbours)]
        neighbours = await load.begin(names, 32, 7000)
        for number in range(args.rounds):
            movers = [f"mover-{number}-{place}" for place in range(args.movers)]
            await load.begin(movers, args.prompt, 3000)
            for moving in rng.sample([False, True], 2):
                gaps, moved, moved_megabytes = await window(made, neighbours, movers if moving else (), args.window_s)
                found[moving] += gaps
                num_moves, megabytes = num_moves + moved, megabytes + moved_megabytes
                what = f"{moved} moves, {moved_megabytes:.0f} MB" if moving else "no move"
                print(f"round {number}: {what}: {describe(gaps)}", flush=True)
            await load.end(movers)
        await load.end(names)
    more = quantile(found[True], 0.99) / quantile(found[False], 0.99) - 1
    print(f"{num_moves} moves with {megabytes:.0f} MB beside {args.neighbours} streams; their inter-token times:")
    print(f"without moves {describe(found[False])}; with them {describe(found[True])}: p99 {100 * more:+.0f} %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--neighbours", type=int, default=8)
    parser.add_argument("--movers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a mover's prompt")
    parser.add_argument("--window-s", type=float, default=6.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--kv-cache-bytes", default="4GiB", help="of each worker")
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(main(parser.parse_args()))
