"""The processes of one simulated cluster: each is the real program, from its settings to its exit status."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from types import SimpleNamespace
from typing import Any

import gpu_worker.serving.process.program as worker_program
import router.program as router_program
from octavo.request.ids import Incarnation, SequenceId
from octavo.settings.router import RouterSettings
from octavo.settings.worker import WorkerSettings
from simulation import engine, pictures
from simulation.blocks import BlockLinks
from simulation.clock import replace_sources
from simulation.event_log import EventLog
from simulation.loop import HOST, Host, SimLoop
from simulation.network import Network
from simulation.store import StoreServer
from simulation.transport import Transport

LEASE_MS, GRACE_MS = 1000, 3000
RESTART_S = (0.1, 1.5)
STORE_URL = "redis://store"
OWNER_DIED, BUDDY_DIED = "owner with a standby died", "buddy died"


class Cluster:
    """Machines by name: store, r0, r1, …, w0, w1, …, c0, c1, …; the hosts are the processes that run on them now."""

    def __init__(self, loop: SimLoop, log: EventLog, seed: int, *, routers: int, workers: int) -> None:
        replace_sources(loop, seed)
        self.loop = loop
        self.log = log
        self.network = Network(loop, seed)
        self.transport = Transport(self.network, log)
        self.links = BlockLinks(self.network, log)
        self.router_names = [f"r{number}" for number in range(routers)]
        self.worker_names = [f"w{number}" for number in range(workers)]
        self.hosts: dict[str, Host] = {}
        self.runners: list[engine.SimRunner] = []  # of all workers that have ever run
        self.poisoned: Counter[str] = Counter()  # how many workers each poison prompt has killed
        self.poisons_left, self.poison_share = 1, 0.02  # how many poison requests are still made, and how soon
        self.json_share = 0.0  # of the streams, which have the form of JSON whatever they else would have been
        self.restarts = True  # whether whatever ends is started again
        self.rng = self.network.rng("cluster")
        self.store = StoreServer(self.network, log, self.new_host("store"))
        self.offsets: dict[str, float] = {}  # of wall clocks, by machine
        self._lives = 0
        self.worker_settings = {
            "append_branches": self.rng.choice([1, 32]),  # 1: tokens gather before they are journalled; 32: never here
            "stream_interval": self.rng.choice([1, 1, 3]),
        }
        chance = self.network.rng("standbys")
        self.worker_settings |= {"standby": chance.random() < 0.5, "standby_tokens": chance.choice([16, 48])}
        self.fetchers: list[Any] = []  # of all workers that have ever run, where they fetch
        self.store.monitor.is_buddy = self._is_buddy
        self._install()

    def _install(self) -> None:
        """Puts the simulation's parts where the programs look for the real ones."""
        self.transport.install()
        self.links.install()
        engine.install()
        pictures.install()
        for program in (router_program, worker_program):
            program.open_store = self._open_store
        worker_program.build_runner = self._build_runner
        router_program.Router = self._recorded(router_program.Router)
        worker_program.Worker = self._recorded(worker_program.Worker)
        worker_program.gc = SimpleNamespace(collect=lambda: 0, freeze=lambda: None)

    def _open_store(self, url: str, on_generation: object = None, **_: object) -> object:
        return self.store.client(HOST.get(), on_generation)

    def _recorded(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """The class of a program; its host knows the one instance that is made of it."""

        def make(*args: Any, **kwargs: Any) -> Any:
            host = HOST.get()
            host.program = program(*args, **kwargs)
            if fetcher := getattr(host.program, "fetcher", None):
                self.fetchers.append(fetcher)
            return host.program

        return make

    def _build_runner(self, settings: WorkerSettings) -> engine.SimRunner:
        runner = engine.SimRunner(self._poison, self.rng.getrandbits(32))
        self.runners.append(runner)
        return runner

    def _poison(self, prompt: list[int]) -> None:
        self.log.count("poison", HOST.get().name)
        self.poisoned[str(prompt)] += 1
        os._exit(137)

    @property
    def endpoints(self) -> list[str]:
        return [f"{name}:7000" for name in self.router_names]

    def new_host(self, name: str) -> Host:
        self._lives = getattr(self, "_lives", 0) + 1
        return Host(self.loop, name, self.network.rng(f"host {name} {self._lives}"))

    def start(self) -> None:
        for name in [*self.router_names, *self.worker_names]:
            self.start_process(name)

    def start_process(self, name: str) -> None:
        host = self.hosts[name] = self.new_host(name)
        host.wall_offset = self.offsets.get(name, 0.0)
        host.on_death.append(lambda: self._note_death(host))
        common = {"store": STORE_URL, "lease_ms": LEASE_MS, "listen": f"{name}:7000", "web_listen": ""}
        if name in self.router_names:
            settings = RouterSettings(admin_listen="", http_listen="", router_id=name, grace_ms=GRACE_MS, **common)
            main = router_program.serve(settings)
        else:
            main = worker_program.serve(
                WorkerSettings(
                    worker_id=name,
                    runner="witness",
                    picture_cache_bytes=pictures.CACHE_BYTES,
                    speculation=("auto", "off")[self._lives % 2],
                    **self.worker_settings,
                    **common,
                )
            )
        task = host.spawn(main)
        host.main = task
        task.add_done_callback(lambda task: self._ended(host, task))
        self.log.add(name, "started")

    def _ended(self, host: Host, task: object) -> None:
        if host.alive:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self.log.errors.append(f"{host}: the program has ended with {error!r}")
            host.die(1 if error else task.result())

    def _is_buddy(self, worker: Incarnation, seq_id: SequenceId) -> bool:
        """Whether the worker has blocks of this sequence as a buddy."""
        programs = [host.program for host in self.hosts.values() if getattr(host.program, "standby_buddy", None)]
        tables = [each.standby_buddy.histories for each in programs if each.listener.incarnation == worker]
        owners = [owner for table in tables for owner in table._owners.values()]
        return any(key[0] == seq_id and kept.num_held for each in owners for key, kept in each.histories.items())

    def _note_death(self, host: Host) -> None:
        self.log.add(host.name, f"ended with {host.exit_status}")
        if host.exit_status and getattr(host.program, "standby_buddy", None):
            if host.program.standby_owner.sequences.num_covered:
                self.log.count(OWNER_DIED, host.name)
            if any(kept.num_held for kept in host.program.standby_buddy.histories.all()):
                self.log.count(BUDDY_DIED, host.name)
        self.network.note_change()
        if self.restarts:
            self.loop.call_later(self.rng.uniform(*RESTART_S), self._restart, host, context=Context())

    def _restart(self, host: Host) -> None:
        if self.hosts[host.name] is host and self.restarts:
            self.start_process(host.name)

    def kill(self, name: str, *, vanishes: bool = False) -> None:
        """SIGKILL; with `vanishes`, the machine goes too, and no connection is reset."""
        host = self.hosts[name]
        host.vanished = vanishes
        host.die(137)

    def terminate(self, name: str) -> None:
        """SIGTERM."""
        host = self.hosts[name]
        if host.alive and signal.SIGTERM in host.signal_handlers:
            host.signal(signal.SIGTERM)

    def pause(self, name: str) -> Host:
        host = self.store.host if name == "store" else self.hosts[name]
        host.pause()
        self.network.note_change()
        return host

    def resume(self, host: Host) -> None:
        host.resume()
        self.network.note_change()
