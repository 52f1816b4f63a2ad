"""A process of a group is killed or stopped in each phase of its work, beside a worker of one process.

    python tests/bench/group_kills.py [phase...]

Prints a row for each phase and victim: streams with other tokens than undisturbed ones (wrong), streams that did not
end (lost), processes and files that stay (left behind), and how long the group's processes took to be gone. A stopped
rank is waited for a lease (2 s here). All but the last are to be 0. Each row takes a start of a worker.
"""

import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from folder_llama import folder_llama
from guard.processes import exists, ranks_of
from live.cluster import ROOT, Cluster, Shape
from live.process import Process, wait_until
from live.reader import Reader

from octavo.client import SamplingParams
from octavo.v1 import admin_pb2
from octavo.wire import statuses

NUM_STREAMS = 10
PROMPTS = [[number, *(30 + place % 60 for place in range(700))] for number in range(NUM_STREAMS)]
PHASES = ("prompt", "decode", "swap", "moving away", "coming", "idle")
VICTIMS = ("front", "rank", "stopped rank")
MOVED = "moved"


class OwnProcesses(Cluster):
    """Each worker starts by itself: no test run is there to adopt processes that a nursery would start."""

    def _process(self, name: str) -> Process:
        return Process(name, self._command(name), self.directory / f"{name}.log", ROOT)


def params(number: int) -> SamplingParams:
    return SamplingParams(temperature=number % 2 * 0.8, seed=number, max_tokens=500, ignore_eos=True)


def start(client, first: int = 0) -> list[Reader]:
    return [
        Reader(
            client.generate(prompt, params(number), request_id=MOVED + str(time.time()) if number == first else None)
        )
        for number, prompt in enumerate(PROMPTS)
    ]


async def reach(phase: str, cluster: Cluster, readers: list[Reader]) -> None:
    """Returns in the middle of a phase of the group."""
    if phase == "idle":
        await asyncio.gather(*(reader.task for reader in readers))
        return
    if phase == "prompt":  # the first of them takes longer than this
        await asyncio.sleep(0.05)
        return
    await readers[0].until(20, 120)
    if phase == "swap":
        await until(lambda: cluster.load("w0").num_swapped > 0, "nothing is swapped")
        await asyncio.to_thread(drain, cluster, undo=True)
    if phase in ("moving away", "coming"):
        target = "w1" if phase == "moving away" else "w0"
        threading.Thread(target=move_one, args=(cluster, target), daemon=True).start()
        await asyncio.sleep(0.3)


async def until(what, why: str) -> None:
    for _ in range(600):
        if await asyncio.to_thread(what):
            return
        await asyncio.sleep(0.02)
    print(f"note: {why} within the time", file=sys.stderr)


def drain(cluster: Cluster, *, undo: bool) -> None:
    """The worker beside the group."""
    list(cluster.admin().DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="w1", undo=undo), timeout=60))


def move_one(cluster: Cluster, target: str) -> None:
    listed = cluster.admin().ListSequences(admin_pb2.ListSequencesRequest(), timeout=10).sequences
    owner = cluster.workers()[target].incarnation
    for each in listed:
        if each.owner and each.owner != owner:
            with statuses.serving_errors():
                request = admin_pb2.MigrateRequest(request_id=each.request_id, worker_id=target)
                cluster.admin().Migrate(request, timeout=30)
            return


async def one(cluster: Cluster, phase: str, victim: str, expected: list[list[int]]) -> str:
    front = cluster.processes["w0"].pid
    shared, group = set(os.listdir("/dev/shm")), [front, *ranks_of(front)]
    async with cluster.client() as client:
        if phase == "swap":  # all streams begin at the group, whatever prefixes the other worker has
            await asyncio.to_thread(drain, cluster, undo=False)
        readers = start(client)
        await reach(phase, cluster, readers)
        pid, number = group[0] if victim == "front" else group[1], signal.SIGKILL
        os.kill(pid, signal.SIGSTOP if victim == "stopped rank" else number)
        began = time.monotonic()
        while any(map(exists, group)) and time.monotonic() - began < 15:  # noqa: ASYNC110  processes set no event
            await asyncio.sleep(0.02)
        gone_s, left = time.monotonic() - began, sum(map(exists, group)) + len(set(os.listdir("/dev/shm")) - shared)
        done, lost = await asyncio.wait([reader.task for reader in readers], timeout=180)
        lost = [*lost, *(task for task in done if task.exception())]
        wrong = sum(reader.tokens.get(0, []) != tokens[: len(reader.tokens.get(0, []))]
                    for reader, tokens in zip(readers, expected, strict=True))  # fmt: skip
    return f"| {phase} | {victim} | {wrong} | {len(lost)} | {left} | {gone_s:.2f} |"


async def table(cluster: Cluster, phases: list[str]) -> None:
    async with cluster.client() as client:
        readers = start(client)
        await asyncio.gather(*(reader.task for reader in readers))
    expected = [reader.tokens[0] for reader in readers]
    print("| phase | killed | wrong | lost | left behind | gone after, s |\n|---|---|---|---|---|---|", flush=True)
    front = cluster.processes["w0"]
    for phase in phases:
        for victim in VICTIMS:
            await asyncio.to_thread(cluster.revive)
            print(await one(cluster, phase, victim, expected), flush=True)
            await asyncio.to_thread(wait_until, lambda: not front.running, 10, "the front is not reaped")
    await asyncio.to_thread(cluster.revive)
    await asyncio.to_thread(cluster.wait_idle)
    print(f"\nload {os.getloadavg()[0]:.1f}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = folder_llama(Path(folder) / "model")
        options = ("--model", str(model), "--threads", "1", "--move-mbytes-per-s", "1")
        memory = ("--kv-cache-bytes", "4MiB", "--swap-bytes", "32MiB", "--preemption", "swap")
        ranks = (("--tensor-parallel", "2", *memory), ("--kv-cache-bytes", "32MiB", "--swap-bytes", "0"))
        shape = Shape(routers=1, workers=2, runner="model", start_s=300.0, worker_args=options, each_worker=ranks)
        cluster = OwnProcesses(Path(folder) / "cluster", shape)
        try:
            cluster.start()
            asyncio.run(table(cluster, sys.argv[1:] or list(PHASES)))
        finally:
            cluster.stop()


if __name__ == "__main__":
    main()
