"""How several GPUs are best used, by arithmetic: nothing here runs on a GPU, or has.

    python tests/bench/sharing.py [--rate 2 4 8] [--prompt 2000] [--output 200]

Simulates steps of Llama 3 8B on two GPUs as replicas, as a group (`--tensor-parallel 2`), and as roles (one for
prompts, one for outputs). A step takes as long as its bytes or its products, whichever is longer, and what ranks send
each other. Prints, of requests that come at random, the time to the first token and between tokens; and what a step
takes alone.
"""

import argparse
import heapq
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

MEMORY_RATE, PRODUCT_RATE = 3.35e12, 600e12  # bytes and operations a second: of a GPU like an H100
LINKS = {"NVLink": (450e9, 10e-6), "100 Gbit/s": (12.5e9, 30e-6)}  # bytes a second, and seconds for each exchange
STEP_S, GROUP_STEP_S = 0.3e-3, 2.5e-3  # launching a step: as a CUDA graph; kernel by kernel, as groups do
STEP_TOKENS = 2048
CALLS = 4  # exchanges of a layer


@dataclass(frozen=True)
class Shape:
    params: float
    layers: int
    hidden: int
    inner: int
    kv_numbers: int  # of a token and layer

    @property
    def kv_bytes(self) -> float:
        return 2.0 * self.layers * self.kv_numbers

    @property
    def column_bytes(self) -> float:
        """What all ranks together contribute for a token."""
        return 2.0 * self.layers * (3 * self.hidden + self.inner)


SHAPES = {
    "Llama 3 8B": Shape(8.0e9, 32, 4096, 14336, 2048),
    "Llama 3 70B": Shape(70.6e9, 80, 8192, 28672, 2048),
}


@dataclass(frozen=True)
class Device:
    """What computes steps: a GPU, or a group of them."""

    shape: Shape
    ranks: int = 1
    link: tuple[float, float] = (1.0, 0.0)

    def step_s(self, prompt_tokens: int, contexts: Sequence[int]) -> float:
        shape, tokens = self.shape, prompt_tokens + len(contexts)
        read = (2 * shape.params + shape.kv_bytes * sum(contexts)) / self.ranks / MEMORY_RATE
        computed = 2 * shape.params * tokens / self.ranks / PRODUCT_RATE
        if self.ranks == 1:
            return max(read, computed) + STEP_S
        rate, each = self.link
        received = shape.column_bytes * tokens * (self.ranks - 1) / self.ranks / rate
        return max(read, computed, GROUP_STEP_S) + received + each * CALLS * shape.layers


@dataclass(order=True)
class Request:
    came: float
    prompt: int = field(compare=False)
    left: int = field(compare=False)  # tokens of output
    computed: int = field(default=0, compare=False)
    times: list[float] = field(default_factory=list, compare=False)


class Worker:
    """Decodes come first in each step, then prompts, in pieces, until it is full."""

    def __init__(self, device: Device, keeps: bool = True) -> None:
        self.device, self.keeps, self.now = device, keeps, 0.0
        self.waiting: list[Request] = []  # by when they came here
        self.running: list[Request] = []

    def step(self) -> Iterator[Request]:
        """Computes one; yields what has its first token and is to go elsewhere."""
        room, pieces = STEP_TOKENS - len(self.running), []
        for request in sorted(each for each in self.waiting if each.came <= self.now):
            piece = min(room, request.prompt - request.computed)
            if piece <= 0:
                break
            pieces.append((request, piece))
            room -= piece
        contexts = [each.prompt + len(each.times) for each in self.running]
        self.now += self.device.step_s(sum(piece for _, piece in pieces), contexts)
        for request in self.running:
            request.times.append(self.now)
            request.left -= 1
        for request, piece in pieces:
            request.computed += piece
            if request.computed == request.prompt:
                self.waiting.remove(request)
                request.times.append(self.now)
                request.left -= 1
                if self.keeps:
                    self.running.append(request)
                else:
                    yield request
        self.running = [each for each in self.running if each.left > 0]


def simulate(workers: Sequence[Worker], requests: Sequence[Request], decoder: Worker | None, move_s: float) -> None:
    for number, request in enumerate(requests):
        heapq.heappush(workers[number % len(workers)].waiting, request)
    everybody = [*workers, *([decoder] if decoder else [])]
    arriving: list[tuple[float, int, Request]] = []
    while busy := [each for each in everybody if each.waiting or each.running] or arriving:
        if decoder and arriving and not decoder.running:
            decoder.now = max(decoder.now, arriving[0][0])
        while decoder and arriving and arriving[0][0] <= decoder.now:
            decoder.running.append(heapq.heappop(arriving)[2])
        busy = [each for each in everybody if each.waiting or each.running]
        worker = min(busy, key=lambda each: each.now)
        if not worker.running:
            worker.now = max(worker.now, min(each.came for each in worker.waiting))
        for request in worker.step():
            heapq.heappush(arriving, (worker.now + move_s, id(request), request))


def row(name: str, shape: Shape, link: tuple[float, float], options: argparse.Namespace, rate: float) -> str:
    rng, came, requests = random.Random(1), 0.0, []
    for _ in range(options.requests):
        came += rng.expovariate(rate)
        requests.append(Request(came, options.prompt, options.output))
    one = Device(shape)
    if name == "two replicas":
        simulate([Worker(one), Worker(one)], requests, None, 0.0)
    elif name == "a group of two":
        simulate([Worker(replace(one, ranks=2, link=link))], requests, None, 0.0)
    else:
        simulate([Worker(one, keeps=False)], requests, Worker(one), shape.kv_bytes * STEP_TOKENS / link[0])
    firsts = sorted(1e3 * (each.times[0] - each.came) for each in requests)
    gaps = sorted(1e3 * (b - a) for each in requests for a, b in zip(each.times, each.times[1:], strict=False))
    at = [
        statistics.median(firsts),
        firsts[99 * len(firsts) // 100],
        statistics.median(gaps),
        gaps[99 * len(gaps) // 100],
    ]
    return " | ".join(f"{each:,.0f}" if each >= 10 else f"{each:.1f}" for each in at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, nargs="+", default=[2, 8, 16], help="requests a second, for both GPUs")
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1500)
    options = parser.parse_args()
    print("| a second | two GPUs as | first token, ms: p50 | p99 | between tokens, ms: p50 | p99 |")
    print("|---|---|---|---|---|---|")
    shape = SHAPES["Llama 3 8B"]
    for rate in options.rate:
        for name in ("two replicas", "a group of two", "roles"):
            for link in LINKS if name == "a group of two" else ["NVLink"]:
                shown = f"{name}, {link}" if name == "a group of two" else name
                print(f"| {rate:g} | {shown} | {row(name, shape, LINKS[link], options, rate)} |")
    print("\nA decode, and a prompt of 2,000 tokens, ms: on one GPU, and on two with each link\n")
    for title, each in SHAPES.items():
        devices = [Device(each), *(Device(each, 2, link) for link in LINKS.values())]
        decodes, prompts = ([1e3 * d.step_s(n, c) for d in devices] for n, c in ((0, [2000]), (2000, [])))
        print(f"| {title} | " + " | ".join(f"{ms:.1f}" for ms in [*decodes, *prompts]) + " |")
        columns, slots = each.column_bytes / 2e3, each.kv_bytes / 1e3
        print(f"{title}: {columns:.0f} KB a token and direction between two, {slots:.0f} KB of a token in blocks")


if __name__ == "__main__":
    main()
