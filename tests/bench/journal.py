"""What journalling costs: the whole service with it and without, at realistic step times, interleaved.

python tests/bench/journal.py [--streams 48] [--tokens 150] [--step-ms 20] [--rounds 5]
"""

import argparse
import asyncio
import statistics

from _service import Load, describe_machine, load, service


async def main(args: argparse.Namespace) -> None:
    print(describe_machine())
    worker = ["--runner", "fake", "--step-delay-ms", str(args.step_ms)]
    prompts = [[1, 2, 3, i + 10] for i in range(args.streams)]
    results: dict[str, list[Load]] = {"strict": [], "off": []}
    async with service(*worker, "--journal", "strict") as strict, service(*worker, "--journal", "off") as off:
        for _ in range(args.rounds):
            for name, running in (("strict", strict), ("off", off)):
                results[name].append(await load(running.client, prompts, args.tokens))
    for name, loads in results.items():
        rate = statistics.median(result.tokens_per_s for result in loads)
        p50, p99 = (statistics.median(result.gap_ms(q) for result in loads) for q in (0.5, 0.99))
        print(f"{name:7} {rate:8.1f} tokens/s   gap p50 {p50:6.2f} ms   p99 {p99:6.2f} ms")
    pairs = list(zip(results["strict"], results["off"], strict=True))
    lost = statistics.median(1 - strict.tokens_per_s / off.tokens_per_s for strict, off in pairs)
    added = statistics.median(strict.gap_ms(0.99) - off.gap_ms(0.99) for strict, off in pairs)
    print(f"lost:   {100 * lost:8.2f} % of throughput   added p99 {added:+.2f} ms, medians of {len(pairs)} pairs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(main(parser.parse_args()))
