"""What OpenAI's API over HTTP costs beside gRPC: the same requests on the same router, in turns.

    python tests/bench/http_overhead.py [--streams 48] [--tokens 200] [--rounds 5] [--step-ms 2]

Measured in processor seconds of the router per token, and in tokens per second of all streams. Rounds of both APIs
follow each other, so other load on the machine meets both. Tokens per second count the clients as well: that of gRPC
parses events, that of HTTP counts them.
"""

import argparse
import asyncio
import json
import statistics
import time

from _service import Service, describe_machine, load, processor_seconds, service

BODY = {"temperature": 0, "ignore_eos": True, "stream": True}
EVENT = b"data: {"


async def stream_over_http(port: int, prompt: list[int], num_tokens: int) -> int:
    """The number of events of one stream."""
    body = json.dumps({**BODY, "prompt": prompt, "max_tokens": num_tokens}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    count, last = 0, b""
    while data := await reader.read(1 << 16):
        count += (last + data).count(EVENT)  # an event that is cut is counted with its second half
        last = data[-len(EVENT) + 1 :]
    writer.close()
    return count


async def http_round(running: Service, prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
    """Processor microseconds of the router per token, and tokens per second."""
    before, began = processor_seconds(running.router), time.perf_counter()
    await asyncio.gather(*(stream_over_http(running.http_port, prompt, num_tokens) for prompt in prompts))
    seconds, total = time.perf_counter() - began, len(prompts) * num_tokens
    return 1e6 * (processor_seconds(running.router) - before) / total, total / seconds


async def grpc_round(running: Service, prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
    before = processor_seconds(running.router)
    result = await load(running.client, prompts, num_tokens)
    return 1e6 * (processor_seconds(running.router) - before) / result.num_tokens, result.tokens_per_s


async def main(args: argparse.Namespace) -> None:
    print(describe_machine())
    prompts = [[1, 2, 3, i + 10] for i in range(args.streams)]
    rounds = {"grpc": grpc_round, "http": http_round}
    costs: dict[str, list[float]] = {name: [] for name in rounds}
    rates: dict[str, list[float]] = {name: [] for name in rounds}
    async with service("--runner", "fake", "--step-delay-ms", str(args.step_ms)) as running:
        for one_round in rounds.values():
            await one_round(running, prompts, 20)
        for number in range(args.rounds):
            for name in sorted(rounds, reverse=bool(number % 2)):
                cost, rate = await rounds[name](running, prompts, args.tokens)
                costs[name].append(cost)
                rates[name].append(rate)
    for name in rounds:
        cost, rate = statistics.median(costs[name]), statistics.median(rates[name])
        print(f"{name}: {cost:6.1f} us of the router per token {[round(each) for each in costs[name]]}")
        print(f"      {rate:6.0f} tokens/s {[round(each) for each in rates[name]]}")
    ratios = sorted(http / grpc for http, grpc in zip(costs["http"], costs["grpc"], strict=True))
    print(f"http/grpc: {statistics.median(ratios):.2f} of the cost ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=2)
    asyncio.run(main(parser.parse_args()))
