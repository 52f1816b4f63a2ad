"""Real processes under load in a storm of random faults: make chaos MINUTES=120 (see README.md)."""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from effort import patience
from guard.processes import command_of, descendants, exists
from live.cluster import ROOT, Shape
from live.process import Process, wait_until
from storm.faults import BEGAN, FaultMissed, Faults
from storm.group_faults import GroupFaults
from storm.leak_audit import audit, files_in_use, num_blocks, processes_naming, uses, wait_quiet
from storm.log_checker import check_folder, summary
from storm.move_faults import MoveFaults
from storm.reference import FILE
from storm.storm_cluster import GROUPS, MIXED, StormCluster, module_command

ROUTER_KILLS_PER_HOUR, WORKER_KILLS_PER_HOUR, OTHERS_PER_HOUR, OF_GROUPS_PER_HOUR = 280.0, 115.0, 240.0, 120.0
CATCH_UP = 3  # faults of one kind that may be under way at once, where some took longer than planned
STATUS_S = 15.0
WARM_UP_S = 8.0
SHARED = Path("/dev/shm")
# The small model's blocks of 16 tokens have 18,432 bytes: of 15 streams the longest do not fit.
MODEL_ARGS = ("--threads", "1", "--kv-cache-bytes", "6MiB", "--swap-bytes", "4MiB")
MISSES = 5  # of one fault, before it counts as one that did not happen
Inject = Callable[[], Awaitable[dict[str, Any]]]


class Storm:
    """One run: its cluster, its faults, its clients, and what was found."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.folder = folder
        self.violations: list[str] = []
        self.leaks: list[str] = []
        self.missed: list[str] = []
        self.counts: Counter[str] = Counter()
        self._arguments = arguments
        self._random = random.Random(arguments.seed)
        model = folder / "model"
        shape = Shape(
            routers=arguments.routers,
            workers=arguments.workers,
            runner="model" if arguments.groups else "witness",
            step_delay_ms=arguments.step_ms,
            lease_ms=3000,
            worker_args=("--model", str(model), *MODEL_ARGS) if arguments.groups else (),
            each_worker=GROUPS if arguments.groups else MIXED if arguments.mixed else (),
        )
        self._cluster = StormCluster(folder, shape, load_s=arguments.load_s)
        self._faults = Faults(self._cluster, self._random)
        self._moves = MoveFaults(self._cluster, self._faults, self._random)
        self._groups = GroupFaults(self._cluster, self._faults, self._random)
        self._reference = folder / FILE if arguments.groups else None
        self._shared = set(SHARED.iterdir())
        self._model = model
        self._log = (folder / "faults.jsonl").open("w", encoding="utf-8")
        self._under_way: set[asyncio.Task[None]] = set()
        self._began = time.monotonic()
        self._over = asyncio.Event()  # set by SIGTERM: the storm ends before its time, and reports what there was
        self._minutes = 0.0

    async def run(self) -> dict[str, Any]:
        cluster, arguments = self._cluster, self._arguments
        try:
            if self._reference is not None:
                await asyncio.to_thread(self._record, self._reference)
            await cluster.start()
            await self._stream("warm-up.jsonl", lambda: asyncio.sleep(WARM_UP_S))
            self._note_left(await wait_quiet(cluster, patience(60)))
            before, blocks = await uses(cluster), await num_blocks(cluster)
            kinds = self._chosen_kinds()
            self._say(f"{arguments.streams} streams, {arguments.minutes:g} minutes, seed {arguments.seed}: {[*kinds]}")
            await self._stream("history.jsonl", lambda: self._rage(kinds))
            self._note_left(await wait_quiet(cluster, patience(90)))
            found = await audit(cluster, before, blocks)
            self.leaks += found["leaks"]
        finally:
            self._log.close()
            codes = await cluster.stop()
        self.violations += [f"{name} ended with {code} at the end" for name, code in codes.items() if code]
        self._note_what_outlives()
        self.violations += [f"left behind: {leak}" for leak in self.leaks]
        return self._report(found)

    def _note_what_outlives(self) -> None:
        """Processes, also those that lost their parent, and shared memory that nobody uses."""
        left = {*descendants(os.getpid()), *processes_naming(f"{self.folder}/")}
        self.leaks += [f"process {pid} is left: {command_of(pid)}" for pid in left if exists(pid)]
        self.leaks += [f"{file} is left" for file in set(SHARED.iterdir()) - self._shared - files_in_use(SHARED)]

    def _record(self, reference: Path) -> None:
        """What the model says to all that streams will ask."""
        options = (str(self._model), str(reference), str(self._arguments.seed))
        command = module_command(self._cluster.code, "storm.reference", *options)
        recorder = Process("reference", command, self.folder / "reference.log", ROOT)
        recorder.start()
        wait_until(lambda: not recorder.running, patience(300), "the answers are not recorded")
        if recorder.exit_code:
            raise SystemExit(f"the answers were not recorded:\n{recorder.tail()}")

    def _chosen_kinds(self) -> dict[str, Inject]:
        kinds = {
            **self._faults.kinds(),
            **self._moves.kinds(),
            **self._groups.kinds(),
            "worker-kill": lambda: self._faults.kill(self._cluster.workers),
            "router-kill": lambda: self._faults.kill(self._cluster.routers),
        }
        wanted = self._arguments.kinds.split(",") if self._arguments.kinds else [*kinds]
        if not self._cluster.store.primary.disk.mounted:
            self._say("disk-full is left out: this process may not mount a tmpfs")
        if unknown := set(wanted) - set(kinds):
            raise SystemExit(f"no such kinds here: {sorted(unknown)}; there are {sorted(kinds)}")
        return {kind: kinds[kind] for kind in wanted}

    def _note_left(self, left: list[str]) -> None:
        self.violations += [f"not quiet: {what}" for what in left]

    async def _stream(self, log: str, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """Has clients stream until `meanwhile` is over and their last streams have ended."""
        arguments = self._arguments
        options = {name: getattr(arguments, name) for name in ("streams", "seed", "backoff_s", "json_share")}
        options |= {"endpoints": self._cluster.client_endpoints, "log": str(self.folder / log), "patience_s": 300.0}
        options |= {"reference": str(self._reference or "")}
        command = module_command(self._cluster.code, "storm.stream_clients", json.dumps(options))
        self._clients = clients = Process("clients", command, self.folder / "clients.log", ROOT)
        await asyncio.to_thread(clients.start)
        try:
            await meanwhile()
            self._cluster.heal()
            for name in self._cluster.processes:
                await self._cluster.ready(name, patience(120))
        finally:
            ended = clients.running
            code = await asyncio.to_thread(clients.stop, patience(300))
        if not ended or code:
            self.violations.append(f"the clients ended with {code}:\n{clients.tail()}")

    # Faults

    async def _rage(self, kinds: dict[str, Inject]) -> None:
        """Faults until the time is over, and until the last one is."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._over.set)
        chains = [asyncio.create_task(self._watch_processes()), asyncio.create_task(self._tell())]
        per_hour = {"router-kill": ROUTER_KILLS_PER_HOUR, "worker-kill": WORKER_KILLS_PER_HOUR}
        per_hour |= dict.fromkeys(self._groups.kinds(), OF_GROUPS_PER_HOUR)
        for rate in (ROUTER_KILLS_PER_HOUR, WORKER_KILLS_PER_HOUR, OF_GROUPS_PER_HOUR, OTHERS_PER_HOUR):
            if chosen := {kind: act for kind, act in kinds.items() if per_hour.get(kind, OTHERS_PER_HOUR) == rate}:
                mean_s = 3600 / rate / self._arguments.rate
                chains.append(asyncio.create_task(self._keep_injecting(mean_s, chosen)))
        began = time.monotonic()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), 60 * self._arguments.minutes)
        self._minutes = round((time.monotonic() - began) / 60, 1)
        for chain in chains[1:]:
            chain.cancel()
        await asyncio.gather(*chains[1:], return_exceptions=True)
        while self._under_way:
            await asyncio.wait(self._under_way)
        chains[0].cancel()
        await asyncio.gather(chains[0], return_exceptions=True)

    async def _keep_injecting(self, mean_s: float, kinds: dict[str, Inject]) -> None:
        """One fault after the other, each kind once before any comes again. What is late is caught up with."""
        due, bag = time.monotonic(), list[str]()
        going: set[asyncio.Task[None]] = set()
        while True:
            due += mean_s * self._random.uniform(0.5, 1.5)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not bag:
                bag = list(kinds)
                self._random.shuffle(bag)
            kind = bag.pop()
            task = asyncio.create_task(self._inject(kind, kinds[kind]))
            for tasks in (going, self._under_way):
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            while len(going) >= CATCH_UP:
                await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)

    async def _inject(self, kind: str, inject: Inject) -> None:
        began = time.monotonic()
        try:
            proof = await self._until_it_happens(inject)
        except FaultMissed as error:
            self.missed.append(f"{kind}: {error}")
            proof = {"missed": str(error)}
        except Exception as error:
            self.violations.append(f"{kind} at {began - self._began:.0f} s: {type(error).__name__}: {error}")
            proof = {"failed": str(error)}
        else:
            self.counts[kind] += 1
        entry = {"kind": kind, "began": BEGAN.get(began), "ended": time.monotonic(), **proof}
        self._log.write(json.dumps(entry) + "\n")
        self._log.flush()

    async def _until_it_happens(self, inject: Inject) -> dict[str, Any]:
        """A fault may miss: nothing is on a link, and nobody writes, while all routers are dead. It is done again."""
        for _ in range(MISSES):
            try:
                return await inject()
            except FaultMissed as error:
                self._say(f"once more: {error}")
        return await inject()

    async def _watch_processes(self) -> None:
        """A process that ends without a fault's doing is a violation, and is started again."""
        while True:
            for name, process in self._cluster.processes.items():
                if not process.running and not self._faults.is_busy(name):
                    self.violations.append(f"{name} ended by itself with {process.exit_code}:\n{process.tail()}")
                    await asyncio.to_thread(process.start)
            if not self._clients.running:
                raise SystemExit(f"the clients have ended:\n{self._clients.tail()}")
            await asyncio.sleep(0.5)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(STATUS_S)
            streams = (self._clients.tail().splitlines() or [""])[-1]
            counts = {name: self.counts[name] for name in ("worker-kill", "router-kill")}
            counts |= {"faults": sum(self.counts.values()), "moved": self._moves.outcomes["moved"]}
            self._say(f"{counts}; streams, tokens, retries: {streams}; load {os.getloadavg()[0]:.1f}")

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {text}", flush=True)

    # The end

    def _report(self, found: dict[str, Any]) -> dict[str, Any]:
        checked = summary(check_folder(self.folder))
        violations = [*self.violations, *checked.pop("violations")]
        violations += [f"a fault did not happen: {missed}" for missed in self.missed]
        arguments = self._arguments
        expected = self._chosen_kinds()
        never = [kind for kind in expected if not self.counts[kind]]
        return {
            "minutes": self._minutes,
            "seed": arguments.seed,
            "streams_at_a_time": arguments.streams,
            "faults": dict(sorted(self.counts.items())),
            "never_happened": never,
            "moves": dict(self._moves.outcomes.most_common()),
            "groups": dict(sorted(self._groups.outcomes.items())),
            **checked,
            "ended_needlessly": len(checked["ended_otherwise"]) - checked["data_loss"],
            "audit": found,
            "left_behind": self.leaks,
            "violations": violations,
        }


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = []
    for name, value in report.items():
        if isinstance(value, dict) and value:
            lines += [f"{name}:", *(f"  {key:<34} {each}" for key, each in value.items())]
        elif isinstance(value, list):
            lines += [f"{name}: {len(value)}", *(f"  {each}" for each in value)]
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--routers", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--backoff-s", type=float, default=1.0, help="how long clients wait at most before a new try")
    parser.add_argument("--kinds", default="", help="only these kinds of faults, separated by commas")
    parser.add_argument("--rate", type=float, default=1.0, help="so many times the usual number of faults")
    parser.add_argument("--json-share", type=float, default=0.0, help="the share of streams whose form is JSON")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--mixed", action="store_true", help="w0 has few blocks, w1 is for prompts, w2 for outputs")
    kinds.add_argument("--groups", action="store_true", help="workers are groups of 1, 2, 4, 2 ranks of a small model")
    parser.add_argument("--load-s", type=float, default=0.0, help="how long each worker takes to load its model")
    parser.add_argument("--folder", default="", help="where logs and report go; empty: build/chaos/<time>")
    arguments = parser.parse_args()
    if arguments.groups and arguments.json_share:
        parser.error("--json-share: --groups has forms of its own list of requests")
    folder = Path(arguments.folder or ROOT / "build" / "chaos" / datetime.now().strftime("%Y%m%d-%H%M%S")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = asyncio.run(Storm(arguments, folder).run())
    (folder / "report.json").write_text(json.dumps(report, indent=2))
    (folder / "report.txt").write_text(as_text(report) + "\n")
    print(as_text(report), f"\n{folder}", flush=True)
    return 1 if report["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
