"""The menu of faults, and which of them a seed orders."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from octavo.request.errors import ServingError
from simulation.cluster import Cluster

Fault = Callable[[], Awaitable[None]]

FAULTS_S = 5.0  # how long faults happen
MAX_FAULTS = 9
# Instead of the seed's choice, where streams of JSON are to change their owners as often as can be.
OWNER_CHANGES = (
    ("worker killed",) * 16 + ("sequences move",) * 24 + ("worker left", "killed in a call", "router killed")
)
OWNER_CHANGES_S = 12.0

OF_PROCESSES = {"killed": ("worker", "router"), "paused": ("worker", "router", "store"), "left": ("worker", "router")}
# What many runs together must have shown, as it is counted where a fault has its effect.
EVERY_KIND = (
    *(f"{who} {what}" for what, names in OF_PROCESSES.items() for who in names),
    *("machine vanished", "killed in a call", "step hung", "clock skew", "poison"),
    *("partition one way", "partition both ways", "slow link", "connection reset", "duplicate"),
    *("store restarted", "lossy failover", "lost request", "lost reply", "late request", "repeated request"),
    *("sequence moved", "sequence stayed", "corrupted block"),
)


class FaultMenu:
    """Each method is one fault, from its beginning to its end; it is counted when it has had an effect."""

    def __init__(self, cluster: Cluster, client_names: list[str]) -> None:
        self._cluster = cluster
        self._network = cluster.network
        self._store = cluster.store
        self._log = cluster.log
        self._clients = client_names
        self._rng: random.Random = cluster.network.rng("faults")
        self._processes = [*cluster.worker_names, *cluster.router_names]
        self.is_lossy = False  # whether the store may have forgotten what it had acknowledged

    @property
    def menu(self) -> dict[str, Fault]:
        names = {"worker": self._cluster.worker_names, "router": self._cluster.router_names, "store": ["store"]}
        acts = {"killed": self._kill, "paused": self._pause, "left": self._leave}
        return {
            **{
                f"{who} {what}": partial(acts[what], f"{who} {what}", names[who])
                for what, whose in OF_PROCESSES.items()
                for who in whose
            },
            "machine vanished": self._vanish,
            "killed in a call": self._kill_in_call,
            "step hung": self._hang,
            "partition one way": partial(self._partition, "partition one way", both_ways=False),
            "partition both ways": partial(self._partition, "partition both ways", both_ways=True),
            "slow link": self._slow_down,
            "connection reset": self._reset,
            "store restarted": self._restart_store,
            "lossy failover": self._fail_over,
            "store calls lost": self._lose_store_calls,
            "calls duplicated": self._duplicate,
            "clock skew": self._skew,
            "sequences move": self._move,
            "blocks corrupted": self._corrupt,
        }

    async def serve(self) -> None:
        """Lets the seed's faults happen, of few kinds in one run, and ends them all."""
        menu = self.menu
        kinds = self._rng.sample(sorted(menu), self._rng.randrange(1, 6))
        ordered = [self._rng.choice(kinds) for _ in range(self._rng.randrange(1, MAX_FAULTS + 1))]
        await asyncio.gather(*(self._serve_one(menu[kind], FAULTS_S) for kind in ordered))
        self.end()

    async def serve_owner_changes(self) -> None:
        """Kills and moves, many of them, and ends them all."""
        await asyncio.gather(*(self._serve_one(self.menu[kind], OWNER_CHANGES_S) for kind in OWNER_CHANGES))
        self.end()

    async def _serve_one(self, fault: Fault, within_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, within_s))
        await fault()

    def end(self) -> None:
        """Heals what is still broken. Processes that have ended are started again, as always."""
        self._network.heal()
        self._cluster.transport.duplicates = self._cluster.links.corrupt = 0.0
        self._store.heal_calls()
        self._log.add("FAULT", "all faults have ended")

    async def _some_time(self, shortest: float, longest: float) -> None:
        await asyncio.sleep(self._rng.uniform(shortest, longest))

    # Processes

    async def _kill(self, kind: str, names: list[str]) -> None:
        name = self._rng.choice(names)
        if self._cluster.hosts[name].alive:
            self._log.count(kind, name)
            self._cluster.kill(name)

    async def _kill_in_call(self) -> None:
        """A process dies at one of its next calls of the store: before the store has it, or before its reply comes."""
        host = self._cluster.hosts[self._rng.choice(self._processes)]
        host.calls_left = self._rng.randrange(1, 12)

    async def _vanish(self) -> None:
        name = self._rng.choice(self._processes)
        if self._cluster.hosts[name].alive:
            self._log.count("machine vanished", name)
            self._cluster.kill(name, vanishes=True)

    async def _pause(self, kind: str, names: list[str]) -> None:
        name = self._rng.choice(names)
        host = self._cluster.pause(name)
        self._log.add("FAULT", f"{kind}: {name} stops")
        await self._some_time(0.1, 4.0)
        if host.paused and host.alive:
            self._log.count(kind, f"{name} goes on, with {len(host.parked)} callbacks")
        self._cluster.resume(host)

    async def _hang(self) -> None:
        host = self._cluster.hosts[self._rng.choice(self._cluster.worker_names)]
        if host.alive and host.program is not None:
            self._log.count("step hung", host.name)
            host.hangs_until = self._cluster.loop.time() + self._rng.uniform(0.5, 6.0)

    async def _leave(self, kind: str, names: list[str]) -> None:
        host = self._cluster.hosts[self._rng.choice(names)]
        if host.alive and not host.paused and signal.SIGTERM in host.signal_handlers:
            self._log.count(kind, host.name)
            host.signal(signal.SIGTERM)

    # Migrations

    async def _move(self) -> None:
        """For some time, sequences of all workers move to others, which the workers choose themselves."""
        for _ in range(self._rng.randrange(5, 40)):
            host = self._cluster.hosts[self._rng.choice(self._cluster.worker_names)]
            worker = host.program if host.alive and not host.paused else None
            seq_ids = sorted(worker.publisher.logs) if worker and worker.migrations else []
            if seq_ids:
                host.spawn(self._move_one(worker, self._rng.choice(seq_ids)))
            await self._some_time(0.0, 0.2)

    async def _move_one(self, worker: Any, seq_id: Any) -> None:
        try:
            progress = worker.migrations.begin(seq_id, worker.publisher.logs[seq_id].epoch)
        except ServingError as error:
            self._log.add("FAULT", f"{seq_id} was not moved: {error}")
            return
        await progress.done.wait()
        self._log.count(f"sequence {progress.outcome.name.lower()}", f"{seq_id}: {progress.error}")

    async def _corrupt(self) -> None:
        """While sequences move, one block in ten comes with a wrong bit."""
        self._cluster.links.corrupt = 0.1
        await self._move()
        self._cluster.links.corrupt = 0.0

    # Network

    def _pairs(self) -> list[tuple[str, str]]:
        """Pairs of machines of which one calls the other."""
        routers, workers = self._cluster.router_names, self._cluster.worker_names
        pairs = [(router, worker) for router in routers for worker in workers]
        pairs += [(name, "store") for name in [*routers, *workers]]
        pairs += [(source, target) for source in workers for target in workers if source != target]
        return pairs + [(client, router) for client in self._clients for router in routers]

    async def _partition(self, kind: str, *, both_ways: bool) -> None:
        pairs = self._rng.sample(self._pairs(), self._rng.randrange(1, 4))
        if not both_ways:
            pairs = [pair if self._rng.random() < 0.5 else pair[::-1] for pair in pairs]
        else:
            pairs += [pair[::-1] for pair in pairs]
        self._network.block(pairs)
        self._log.add("FAULT", f"{kind}: {pairs}")
        held = self._network.num_held
        await self._some_time(0.1, 6.0)
        if self._network.num_held > held:
            self._log.count(kind, f"ends: {pairs}")
        self._network.heal(pairs)

    async def _slow_down(self) -> None:
        pairs = self._rng.sample(self._pairs(), self._rng.randrange(1, 4))
        pairs += [pair[::-1] for pair in pairs]
        self._network.slow_down(pairs, self._rng.choice([0.02, 0.1, 0.5]))
        self._log.count("slow link", str(pairs))
        await self._some_time(0.5, 4.0)
        self._network.heal(pairs)

    async def _reset(self) -> None:
        for _ in range(self._rng.randrange(1, 4)):
            if connections := self._cluster.transport.open_connections():
                connection = self._rng.choice(connections)
                self._log.count("connection reset", str(connection.number))
                connection.break_client()
                connection.break_server()
            await self._some_time(0.0, 0.5)

    async def _duplicate(self) -> None:
        self._cluster.transport.duplicates = 0.5
        await self._some_time(1.0, 4.0)
        self._cluster.transport.duplicates = 0.0

    # The store

    async def _restart_store(self) -> None:
        if self._store.down:
            return
        self._store.down = True
        self._log.count("store restarted", "goes")
        await self._some_time(0.02, 3.0)
        self._store.come_back()
        self._log.add("FAULT", "store restarted: is back")

    async def _fail_over(self) -> None:
        if self._store.down:
            return
        self._store.stop_replication()
        await self._some_time(0.005, 0.5)
        self._store.down = True
        if self._rng.random() < 0.5:  # the owner could append again what the store has lost
            await self._kill("worker killed", self._cluster.worker_names)
        await self._some_time(0.02, 1.0)
        self.is_lossy = True
        self._store.fail_over()
        self._store.down = False
        self._log.count("lossy failover", "the replica is the primary")

    async def _lose_store_calls(self) -> None:
        store, rng = self._store, self._rng
        store.lost_requests, store.lost_replies = rng.choice([0.0, 0.05, 0.2]), rng.choice([0.0, 0.05, 0.2])
        store.late, store.twice = rng.choice([0.0, 0.05, 0.1]), rng.choice([0.0, 0.1, 0.3])
        await self._some_time(0.5, 3.0)
        store.heal_calls()

    # Clocks

    async def _skew(self) -> None:
        name = self._rng.choice(self._processes)
        host = self._cluster.hosts[name]
        jump_s = self._rng.choice([-600.0, -30.0, 30.0, 600.0])
        self._log.count("clock skew", f"{name}: {jump_s:+.0f} s")
        host.wall_offset = self._cluster.offsets[name] = jump_s
        before = host.monotonic()
        host.monotonic_rate = self._rng.uniform(0.95, 1.05)
        host.monotonic_offset += before - host.monotonic()
