"""What a standby, or a disk tier, saves when an owner is killed, and what it costs: `octavo up` and the demo model.

    python tests/bench/standby.py deaths --context 4096 8000 --rounds 3 --within-ms 200
    python tests/bench/standby.py throughput --streams 8 --rounds 5

`deaths` kills the owner of one stream with SIGKILL and says how long its client waited: until another worker owned the
sequence (the death was noticed, and a lease renewal missed), and from then to the next token. The tokens are compared
with those of an undisturbed run. It dies at once when its client has got tokens, so that a step has just ended, or at a
random moment within --within-ms. `throughput` makes rounds by turns on two clusters, with and without, of which the
other one is idle meanwhile; processor time is counted to the last token, and for some seconds more, for what is left to
write or to send. With `--disk` it is all about a disk tier.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from _service import describe_machine, processor_seconds

from octavo.client import AsyncClient

VOCABULARY = 40_000
NICE_S = 3.0
SETTLE_S = 1.5  # a router sees a worker that came back
AFTER_S = 4.0  # how much longer than a round processor time is counted


class Cluster:
    """`octavo up` in a directory of its own."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self._state = directory / "state.json"
        command = [sys.executable, "-m", "octavo.cli", "up", "--state-dir", str(directory), "--grpc-port", "0"]
        self._log = (directory / "up.log").open("w")
        self._process = subprocess.Popen([*command, *options], stdout=self._log, stderr=subprocess.STDOUT)

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._state.read_text())
        return found

    @property
    def endpoint(self) -> str:
        return str(self.state["routers"][0]["endpoint"])

    def pid_of(self, worker_id: str) -> int:
        return next(int(each["pid"]) for each in self.state["workers"] if each["worker_id"] == worker_id)

    def renice(self, nice: int) -> None:
        """The priority of all threads of routers, workers and the store, and of this client."""
        state = self.state
        pids = [os.getpid(), state["store"]["pid"], *(each["pid"] for each in [*state["routers"], *state["workers"]])]
        for pid in pids:
            for thread in Path(f"/proc/{pid}/task").glob("*"):
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)
        self._log.close()


class Rates(NamedTuple):
    """What a round has brought."""

    tokens_per_s: float
    cpu_ms: float  # of both workers, for each token
    whole_cpu_ms: float  # the same with what they did in the seconds after the last token


@contextmanager
def cluster(*options: str) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="octavo-standby-") as directory:
        made = Cluster(Path(directory), *options)
        try:
            yield made
        finally:
            made.stop()


async def connect(made: Cluster) -> AsyncClient:
    deadline = time.monotonic() + 180
    while True:
        try:
            client = AsyncClient(made.endpoint)
            await client.complete([1, 2, 3], max_tokens=2, temperature=0)
            return client
        except Exception:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, VOCABULARY), k=num_tokens)


async def undisturbed(client: AsyncClient, prompt: list[int], num_output: int) -> list[int]:
    answer = await client.complete(prompt, max_tokens=num_output, temperature=0, ignore_eos=True)
    return list(answer.outputs[0].token_ids)


async def one_death(
    made: Cluster, client: AsyncClient, prompt: list[int], num_before: int, nice: int = 0, within_ms: int = 0
) -> dict[str, Any]:
    """Kills the owner after so many tokens. Times in ms."""
    arrivals: list[float] = []
    tokens: list[int] = []
    killed_at = 0.0
    stream = client.generate(prompt, max_tokens=num_before + 40, temperature=0, ignore_eos=True)
    async for event in stream:
        if event.token_ids:
            arrivals.append(time.monotonic())
            tokens += event.token_ids
        if nice and num_before - 10 <= len(tokens) < num_before:
            made.renice(nice)
        if len(tokens) >= num_before and not killed_at:
            status = await client.get(event.request_id)
            owner = [entry.worker for entry in status.timeline if entry.what == "taken"][-1]
            pid, wait_s = made.pid_of(owner), random.uniform(0, within_ms / 1000)
            killed_at = time.monotonic() + wait_s
            asyncio.get_running_loop().call_later(wait_s, os.kill, pid, signal.SIGKILL)
            if nice:
                asyncio.get_running_loop().call_later(NICE_S, made.renice, 0)
    timeline = (await client.get(event.request_id)).timeline
    first_ms = next(entry.after_ms for entry in timeline if entry.what == "first_token")
    taken_ms = [entry.after_ms for entry in timeline if entry.what == "taken"][-1]
    taken_at = arrivals[0] + (taken_ms - first_ms) / 1000
    around = [pair for pair in itertools.pairwise(arrivals) if pair[1] > killed_at]  # a busy machine has other gaps
    last, following = max(around, key=lambda pair: pair[1] - pair[0])
    return {
        "whole": 1000 * (following - last),
        "pause": 1000 * (following - killed_at),
        "noticed": 1000 * (taken_at - last),
        "after": 1000 * (following - taken_at),
        "tokens": tokens,
    }


async def deaths(made: Cluster, args: argparse.Namespace) -> None:
    rounds, num_before = args.rounds, args.output
    client = await connect(made)
    for context in args.context:
        results = []
        for number in range(rounds):
            await wait_for_workers(made)
            prompt = prompt_of(context - num_before, 1000 * context + number)
            result = await one_death(made, client, prompt, num_before, args.nice, args.within_ms)
            await wait_for_workers(made)
            expected = await undisturbed(client, prompt, len(result["tokens"]))
            assert result["tokens"] == expected, "the tokens are others than those of an undisturbed run"
            results.append(result)
            print("    ", {name: round(each) for name, each in result.items() if name != "tokens"}, flush=True)
        figures = (
            f"{name} {statistics.median(each[name] for each in results):.0f} ms"
            f" ({min(each[name] for each in results):.0f} to {max(each[name] for each in results):.0f})"
            for name in ("whole", "pause", "noticed", "after")
        )
        print(
            f"  {context} tokens of history, {rounds} deaths: {', '.join(figures)}; all tokens as undisturbed",
            flush=True,
        )
    await client.close()


async def wait_for_workers(made: Cluster, number: int = 2) -> None:
    """Until so many workers serve, and the router knows it."""
    deadline = time.monotonic() + 120
    command = [sys.executable, "-m", "octavo.cli", "status", "--state-dir", str(made.directory), "--json"]
    while True:
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        try:
            workers = json.loads(done.stdout)["workers"]
            if sum(each["available"] for each in workers) == number:
                break
        except (ValueError, KeyError):
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(done.stdout + done.stderr)
        await asyncio.sleep(0.5)
    await asyncio.sleep(SETTLE_S)


async def one_round(made: Cluster, client: AsyncClient, num_streams: int, num_prompt: int, num_output: int) -> Rates:
    """Streams that begin together, with prompts that nobody has seen."""
    workers = [psutil.Process(int(each["pid"])) for each in made.state["workers"]]
    before, began = sum(map(processor_seconds, workers)), time.monotonic()
    prompts = [prompt_of(num_prompt, random.getrandbits(32)) for _ in range(num_streams)]
    await asyncio.gather(*(undisturbed(client, prompt, num_output) for prompt in prompts))
    seconds, used = time.monotonic() - began, sum(map(processor_seconds, workers)) - before
    await asyncio.sleep(AFTER_S)
    whole = sum(map(processor_seconds, workers)) - before
    num_tokens = num_streams * num_output
    return Rates(num_tokens / seconds, 1000 * used / num_tokens, 1000 * whole / num_tokens)


async def throughput(with_it: list[str], rounds: int, num_streams: int, num_prompt: int, num_output: int) -> None:
    """Rounds by turns, on two clusters of which one is idle."""
    with cluster("--workers", "2", *with_it) as first, cluster("--workers", "2") as second:
        made = {"with": (first, await connect(first)), "without": (second, await connect(second))}
        rates: dict[str, list[Rates]] = {name: [] for name in made}
        for number in range(rounds + 1):
            for name in sorted(made, reverse=bool(number % 2)):
                rate = await one_round(*made[name], num_streams, num_prompt, num_output)
                rates[name] += [rate] if number else []  # the first round warms up
                print(
                    f"  {name}: {rate.tokens_per_s:.0f} tokens/s, {rate.cpu_ms:.2f} ms of CPU a token,"
                    f" {rate.whole_cpu_ms:.2f} with the seconds after it",
                    flush=True,
                )
        for what in Rates._fields:
            pairs = zip(rates["with"], rates["without"], strict=True)
            ratios = [getattr(one, what) / getattr(other, what) for one, other in pairs]
            found = ", ".join(f"{each:.3f}" for each in ratios)
            print(f"  {what}, with ÷ without: median {statistics.median(ratios):.3f} of {found}")
        for _, client in made.values():
            await client.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("deaths", "throughput"))
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 8000], help="tokens of history at the death")
    parser.add_argument("--prompt", type=int, default=1100, help="tokens of each prompt, of throughput")
    parser.add_argument("--output", type=int, default=1000, help="tokens of output, until the death or in all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--nice", type=int, default=0, help="of the cluster's processes for 3 s around each death")
    parser.add_argument("--within-ms", type=int, default=0, help="the owner dies at a random moment of so many")
    parser.add_argument("--disk", action="store_true", help="a disk tier instead of standbys")
    parser.add_argument("--only", choices=("with", "without"))
    parser.add_argument(
        "--up", nargs="*", default=[], help="further options of octavo up, without their dashes: dtype=bfloat16"
    )
    args = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory(prefix="octavo-blocks-") as directory:
        await measure(args, ["--disk-tier", directory] if args.disk else ["--standby"])


async def measure(args: argparse.Namespace, with_it: list[str]) -> None:
    if args.what == "throughput":
        await throughput(with_it, args.rounds, args.streams, args.prompt, args.output)
        return
    more = [f"--{each}" for each in args.up]
    for name, options in {"with": with_it, "without": []}.items():
        if args.only in (None, name):
            print(f"{name} {with_it[0]} {' '.join(more)}", flush=True)
            with cluster("--workers", "2", *options, *more) as made:
                await deaths(made, args)


if __name__ == "__main__":
    asyncio.run(main())
