"""Plays a cell under load on a simulated clock: python tests/bench/fair_queue.py [--seconds 300] [--seed 1]

Goals: equal tenants get equal numbers of tokens within 10 %; a tenant that floods the queue raises the TTFT p99 of the
others at most 1.5 times; a rejection takes at most 10 ms; at three times the load that a cell can carry, its goodput
is at least 90 % of the highest. The cell is tests/support/queue_model.py. The clock times nothing but the rejections,
which are those of a real server.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from queue_model import DEADLINE_S, LIMITS, NUM_SLOTS, Cell, Load, Outcome, capacity

from octavo.local.embedded import EmbeddedStore
from octavo.store.calls import AcceptStatus, QueueLimits
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions


async def shares(seconds: float, seed: int) -> None:
    print("equal tenants: the greatest distance of a tenant's tokens from the mean, and Jain's index")
    for title, asks in (("8 tenants ask for the same", [512] * 8), ("4 ask for 512, 4 for 4096", [512, 4096] * 4)):
        for num_routers in (1, 2, 4):
            cell = Cell(num_routers, seed, QueueLimits())
            loads = [Load(f"t{i}", at_once=16 + 16 * (i % 3), max_tokens=asks[i]) for i in range(8)]
            outcomes = await cell.play(loads, seconds, 60)
            tokens = [outcome.tokens for outcome in outcomes.values()]
            mean = statistics.mean(tokens)
            jain = sum(tokens) ** 2 / (len(tokens) * sum(each**2 for each in tokens))
            print(f"  {title}, {num_routers} routers: {max(abs(t - mean) for t in tokens) / mean:6.1%}  {jain:.4f}")


async def flood(seconds: float, seed: int) -> None:
    print("TTFT of four tenants at 40 % of what the cell can carry, ms: p50, p99, and p99 beside being alone")
    victims = [Load(f"t{i}", per_s=0.1 * capacity()) for i in range(4)]
    alone = 0.0
    for title, tenant, bound in (
        ("alone", "", 0),
        ("beside a flood of 10 times the capacity", "flood", 16),
        ("the same, all one tenant (as first come, first served)", "t", 0),
    ):
        loads = [replace(load, tenant="t") for load in victims] if tenant == "t" else victims
        cell = Cell(2, seed, replace(LIMITS, tenant_requests=bound))
        if tenant:
            loads = [*loads, Load(tenant, per_s=10 * capacity(), retries=False)]
        outcomes = await cell.play(loads, seconds, 60)
        ttfts = Outcome(ttfts=[t for name, each in outcomes.items() if name != "flood" for t in each.ttfts])
        alone = alone or ttfts.ttft(0.99)
        print(f"  {title}: {1000 * ttfts.ttft(0.5):.0f}  {1000 * ttfts.ttft(0.99):.0f}  {ttfts.ttft(0.99) / alone:.2f}")


async def overload(seconds: float, seed: int) -> None:
    print(f"goodput: tokens/s of answers that were complete within {DEADLINE_S} s, retries after RetryInfo")
    best = 0.0
    for factor in (0.8, 1, 1.2, 2, 3):
        cell = Cell(2, seed, LIMITS)
        loads = [Load(f"t{i}", per_s=factor * capacity() / 4) for i in range(4)]
        outcomes = (await cell.play(loads, seconds, 60)).values()
        good = sum(each.good_tokens for each in outcomes) / seconds
        best = max(best, good)
        late, refused = sum(each.num_late for each in outcomes), sum(each.num_refused for each in outcomes)
        print(f"  {factor:3} x: {good:7.0f}  {good / best:4.0%} of the highest; {late} late, {refused} refusals")


async def rejections() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedStore(Path(folder))
        await server.start()
        store = RedisStore(server.url, RedisOptions())
        await store.open()
        cell = Cell(1, 1, LIMITS)
        took = []
        for i in range(1064):
            new = cell.request(Load(f"t{i % 40}")).new
            begun = time.perf_counter()
            reply = await store.accept(new, LIMITS)
            if reply.status is AcceptStatus.FULL:
                took.append(1000 * (time.perf_counter() - begun))
        await store.close()
        await server.stop()
    took.sort()
    print(f"a rejection by a real server, ms: p50 {took[500]:.2f}, p99 {took[990]:.2f}, longest {took[-1]:.2f}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="simulated seconds of each run")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"{NUM_SLOTS} slots, {capacity():.1f} requests/s, {args.seconds:.0f} simulated seconds, seed {args.seed}")
    await shares(args.seconds, args.seed)
    await flood(args.seconds, args.seed)
    await overload(args.seconds, args.seed)
    await rejections()


if __name__ == "__main__":
    asyncio.run(main())
