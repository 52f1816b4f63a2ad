"""What a storm must not leave behind: blocks in use, tickets, pins, keys of live sequences, files, threads, tasks."""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guard.processes import command_of
from live.cluster import idle
from storm.storm_cluster import StormCluster
from waiting import until

# More than at the start, that is no leak: the pool of connections to the store (16), and connections of other processes
# that were started again and whose old ones gRPC has not closed yet; threads of gRPC and of asyncio's executor, which
# are started when needed and stay; calls under way.
SLACK = {"files": 40, "threads": 24, "tasks": 8}
INDEXES = ("live", "queue", "claims", "owned:", "attached:", "deadlines", "detached", "accounts")


@dataclass(slots=True)
class ProcessUse:
    """What one process has."""

    files: int
    threads: int
    tasks: int
    names: dict[str, int] = field(default_factory=dict)
    moves: dict[str, int] = field(default_factory=dict)  # what is left of moves: tickets, pins, imports, migrations


async def use_of(cluster: StormCluster, name: str) -> ProcessUse:
    """Of a process that runs."""
    pid, told = cluster.processes[name].pid, cluster.observation(name)
    with suppress(FileNotFoundError):
        told.unlink()
    os.kill(pid, signal.SIGUSR1)
    await until(told.exists, 60)
    found = json.loads(told.read_text())
    assert found["pid"] == pid
    files, threads = (len(list(Path(f"/proc/{pid}/{folder}").iterdir())) for folder in ("fd", "task"))
    return ProcessUse(files, threads, found["tasks"], found["names"], found["moves"])


async def uses(cluster: StormCluster) -> dict[str, ProcessUse]:
    return {name: await use_of(cluster, name) for name in cluster.processes}


async def wait_quiet(cluster: StormCluster, patience_s: float) -> list[str]:
    """Returns when nothing runs and nothing waits; else, after the patience, what still does."""
    until = time.monotonic() + patience_s
    while left := [*await _busy_workers(cluster), *await live_keys(cluster)] or await _moves_left(cluster):
        if time.monotonic() > until:
            return left
        await asyncio.sleep(0.5)
    return []


async def _busy_workers(cluster: StormCluster) -> list[str]:
    loads = await cluster.loads()
    return [f"{name} is not idle: {str(load).split()}" for name, load in loads.items() if not idle(load)]


async def _moves_left(cluster: StormCluster) -> list[str]:
    found = {name: (await use_of(cluster, name)).moves for name in cluster.workers}
    return [f"{name} still has {moves}" for name, moves in found.items() if moves]


async def live_keys(cluster: StormCluster) -> list[str]:
    """Keys of sequences that have not ended, and index keys that are not empty."""
    client, found = cluster.store.primary.client, []
    async for key in client.scan_iter("octavo:*", count=1000):
        name = key.partition(":")[2]
        if name.startswith("seq:") and name.count(":") == 1:
            state = await client.hget(key, "state")
            if state in ("QUEUED", "RUNNING"):
                found.append(f"{key} is {state}: {await client.hget(key, 'timeline')!r}")
        elif name.startswith(INDEXES) and not (name.startswith("accounts") and await client.hlen(key) == 1):
            found.append(f"{key} is there: {await _content(client, key)}")
    return found


async def _content(client: Any, key: str) -> str:
    kind = await client.type(key)
    if kind == "zset":
        return str(await client.zrange(key, 0, 9))
    if kind == "set":
        return str(list(await client.smembers(key))[:10])
    return str(await client.get(key)) if kind == "string" else kind


async def audit(cluster: StormCluster, before: dict[str, ProcessUse], total_blocks: dict[str, int]) -> dict[str, Any]:
    """The findings, with what was left behind under "leaks". Everything is healed and quiet when it is called."""
    client = cluster.store.primary.client
    keys = [key async for key in client.scan_iter("octavo:*", count=1000)]
    leaks = [f"{key} never expires" for key in keys if await client.pttl(key) == -1]
    leaks += await live_keys(cluster)
    for name, load in (await cluster.loads()).items():
        if load.num_used_blocks or load.num_free_blocks + load.num_cached_blocks != total_blocks[name]:
            leaks.append(f"{name} has {str(load).split()}, of {total_blocks[name]} blocks")
    after = await uses(cluster)
    for kind in (cluster.routers, cluster.workers):
        for what, slack in SLACK.items():
            most = max(getattr(before[name], what) for name in kind)
            for name in kind:
                have = getattr(after[name], what)
                if have > most + slack:
                    leaks.append(f"{name} has {have} {what}, {most} at the start: {after[name].names}")
    leaks += [f"{name} has {after[name].moves}, and no sequence moves" for name in cluster.workers if after[name].moves]
    records = [key for key in keys if key.startswith("octavo:seq:") and key.count(":") == 2]
    states = Counter([await client.hget(key, "state") or "?" for key in records])
    return {
        "leaks": leaks,
        "records": dict(states),
        "keys": await client.dbsize(),
        "processes": {
            name: {what: [getattr(before[name], what), getattr(after[name], what)] for what in SLACK} for name in after
        },
    }


def processes_naming(text: str) -> list[int]:
    """All processes of the machine whose command line has it, whoever has started them."""
    pids = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]
    return [pid for pid in pids if text in command_of(pid)]


def files_in_use(folder: Path) -> set[Path]:
    """The files of a folder that a process maps."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped = [line for line in maps.read_text().splitlines() if f" {folder}/" in line]
            found |= {Path(line.split(maxsplit=5)[5]) for line in mapped}
    return found


async def num_blocks(cluster: StormCluster) -> dict[str, int]:
    """All blocks of each worker."""
    loads = (await cluster.loads()).items()
    return {name: load.num_free_blocks + load.num_cached_blocks + load.num_used_blocks for name, load in loads}
