"""One store under the load of a whole cell: 10,000 streams of 30 tokens/s, 100 workers, 8 routers; then a death.

    python tests/bench/store_load.py [--streams 10000] [--seconds 4] [--stretch 6] [--server redis-server] [--profile]

Routers and workers are simulated, in processes of their own: they call the store as the real ones do, through the same
client, and compute nothing. The figure is processor time of the store's process per stream-second, so other load on
the machine matters little. Time runs `--stretch` times slower, for the store's functions, too. `--profile` adds the
time of each function, by os.clock in the library itself, which costs about a microsecond per call.
"""

import argparse
import asyncio
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
from _simulated_cell import STEPS_PER_S, CellPlan, Usage, play

from octavo.local.embedded import EmbeddedStore
from octavo.store import library
from octavo.store.redis import RedisStore

NUM_SITES = 4
CLOCK = """
local function now_ms()
  local time = redis.call('TIME')
  return math.floor((tonumber(time[1]) * 1000 + tonumber(time[2]) / 1000) / STRETCH)
end
"""
PROFILE = """
local spent = {}
local function profiled(wanted)
  local name, body = wanted.function_name, wanted.callback
  wanted.callback = function(keys, args)
    local began = os.clock()
    local reply = body(keys, args)
    local entry = spent[name] or { 0, 0 }
    entry[1], entry[2], spent[name] = entry[1] + 1, entry[2] + os.clock() - began, entry
    return reply
  end
  redis.register_function(wanted)
end
redis.register_function{ function_name = 'octavo1_profile', callback = function()
  local reply = {}
  for name, entry in pairs(spent) do
    reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = name, entry[1], math.floor(1e6 * entry[2])
  end
  spent = {}
  return reply
end }
"""


def source(stretch: float, profile: bool) -> str:
    parts = library.parts() | {"00_clock.lua": CLOCK.replace("STRETCH", str(stretch))}
    if not profile:
        return library.join(parts)
    counted = {name: text.replace("redis.register_function", "profiled") for name, text in parts.items()}
    return library.join({"": PROFILE, **counted})


def shares(streams: int, workers: int) -> list[float]:
    """How many streams each worker runs: the first one a tenth of the others."""
    each = streams / (workers - 0.9)
    return [each / 10] + [each] * (workers - 1)


class Cell:
    """The processes of a simulated cell."""

    def __init__(self, options: argparse.Namespace, url: str, text: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        sizes = shares(options.streams, options.workers)
        for site in range(NUM_SITES):
            mine, theirs = context.Pipe()
            plan = CellPlan(
                url, text, options.stretch, site, options.routers // NUM_SITES, tuple(sizes[site::NUM_SITES]),
                options.tokens_per_append,
            )  # fmt: skip
            process = context.Process(target=play, args=(plan, theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    async def ask(self, *command: Any, site: int | None = None) -> list[Any]:
        """The replies of all processes, or of one."""
        asked = self.pipes if site is None else [self.pipes[site]]
        for pipe in asked:
            pipe.send(command)
        return [await asyncio.to_thread(pipe.recv) for pipe in asked]

    async def usage(self) -> Usage:
        total = Usage()
        for usage in await self.ask("usage"):
            total.calls += usage.calls
            total.tokens, total.items = total.tokens + usage.tokens, total.items + usage.items
            total.refused += usage.refused
            for name, latencies in usage.latencies.items():
                total.latencies[name] += latencies
        return total


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


def processor_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def print_profile(store: RedisStore, stream_seconds: float) -> None:
    flat = await store.server.client.fcall("octavo1_profile", 0)
    rows = [(flat[i].decode().removeprefix("octavo1_"), flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
    print(f"{'function':>14} {'calls':>9} {'us/call':>9} {'us per stream-second':>22}")
    for name, calls, usec in sorted(rows, key=lambda row: -row[2]):
        print(f"{name:>14} {calls:9d} {usec / calls:9.1f} {usec / stream_seconds:22.2f}")


async def main(options: argparse.Namespace) -> None:
    text = source(options.stretch, options.profile)
    with tempfile.TemporaryDirectory() as directory:
        found = shutil.which(options.server) if options.server else None
        server = EmbeddedStore(Path(directory), binary=Path(found) if found else None)
        await server.start()
        store = RedisStore(server.url, source=text)
        await store.open()
        pid = server.pid or 0
        cell = Cell(options, server.url, text)
        print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; {options.server or 'valkey'}")
        await cell.ask("fill")
        memory = int((await store.server.client.info("memory"))["used_memory"]) / 2**20
        await cell.ask("start")
        await asyncio.sleep(1.5 * options.stretch)
        await cell.usage()
        if options.profile:
            await store.server.client.fcall("octavo1_profile", 0)
        before = processor_s(pid)
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(options.seconds * options.stretch)
        spent = processor_s(pid) - before
        seconds = (asyncio.get_running_loop().time() - began) / options.stretch
        usage = await cell.usage()
        stream_seconds = usage.tokens / STEPS_PER_S
        if options.profile:
            await print_profile(store, stream_seconds)
        await cell.ask("pause")
        reached = stream_seconds / seconds
        print(f"{reached:.0f} streams kept up; {memory:.0f} MiB for {options.streams} records; {usage.refused} refused")
        print(f"store: {1e6 * spent / stream_seconds:.1f} us of processor per stream-second")
        print(f"       {spent / stream_seconds * options.streams:.0%} of a core at {options.streams} streams")
        print(f"       {usage.items / stream_seconds:.1f} appended items per stream-second")
        print(f"{'function':>14} {'calls/s':>9} {'p50 ms':>8} {'p99 ms':>8}")
        for name, calls in usage.calls.most_common():
            p50, p99 = (1e3 * quantile(usage.latencies[name], share) for share in (0.5, 0.99))
            print(f"{name:>14} {calls / seconds:9.0f} {p50:8.2f} {p99:8.2f}")
        for _ in range(2):
            await print_death(cell, pid)
        await cell.ask("end")
        for process in cell.processes:
            process.join(5)
        await store.close()
        await server.stop()


async def print_death(cell: Cell, pid: int) -> None:
    """Lets the first worker of the first process die while all else rests, and every router recover its streams."""
    ((owner, streams),) = await cell.ask("lose", 0, site=0)
    await cell.usage()
    before = processor_s(pid)
    await cell.ask("recover", owner)
    spent = processor_s(pid) - before
    usage = await cell.usage()
    calls = ", ".join(f"{count} {name}" for name, count in usage.calls.most_common())
    each = f"{1e3 * spent / streams:.2f} ms each" if streams else ""
    print(f"death of a worker with {streams} streams: {1e3 * spent:.0f} ms of processor, {each}: {calls}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--routers", type=int, default=8, help="a multiple of 4")
    parser.add_argument("--seconds", type=float, default=4.0, help="of simulated time")
    parser.add_argument("--stretch", type=float, default=6.0, help="how many seconds a simulated second takes")
    parser.add_argument("--tokens-per-append", type=int, default=2, help="after a stream's first token")
    parser.add_argument("--server", default="", help="a server on PATH; else the one that `octavo up` starts")
    parser.add_argument("--profile", action="store_true")
    asyncio.run(main(parser.parse_args()))
