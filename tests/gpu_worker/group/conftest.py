"""A model in a folder, and groups that run it."""

import os
import random
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import random_models
from folder_llama import folder_llama, save_bytes_tokenizer
from guard.processes import exists, lasting
from live.network_hosts import network_hosts, run, why_none
from live.nursery import NurseryProcess, NurseryRank
from live.process import Process, wait_until

from gpu_worker.group import device_group, loading
from gpu_worker.group.group_runner import GroupRunner
from gpu_worker.group.hosts.host_streams import HostPlace, HostStreams, meet_hosts
from gpu_worker.group.loading import load_group
from octavo.net.security.listener_tls import ListenerTls
from octavo.wire.endpoint import Endpoint

ROOT = Path(__file__).resolve().parents[3]
SIZES: dict[str, Any] = {
    "threads": 1,
    "block_size": 16,
    "kv_cache_bytes": 40 * 3 * 3 * 2 * 16 * 16 * 4,  # 40 blocks: too few for all, so that some are swapped
    "swap_bytes": 1 << 22,
    "max_batch_tokens": 96,
    "max_batch_sequences": 16,
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Models by their kinds and seeds, each made once."""
    made = {("llama", 3): folder}

    def make(kind: str, seed: int = 3) -> Path:
        if (kind, seed) not in made:
            draw = random.Random(seed)
            random_of = random_models.random_gpt if kind in random_models.GPTS else random_models.random_mixture
            saved = random_models.save_random(random_of(draw, kind), tmp_path_factory.mktemp(kind))
            save_bytes_tokenizer(saved)
            made[kind, seed] = saved
        return made[kind, seed]

    return make


@contextmanager
def forking_ranks() -> Iterator[None]:
    """A rank that imports torch takes four seconds of a processor."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (loading, device_group):
            patch.setattr(module, "RankProcess", NurseryRank)
        yield


@pytest.fixture
def forked_ranks() -> Iterator[None]:
    with forking_ranks():
        yield


@pytest.fixture
def group(folder: Path, forked_ranks: None) -> Iterator[Callable[..., GroupRunner]]:
    """Starts a group of so many ranks. No rank is left when the test ends."""
    with ExitStack() as stack:

        def start(ranks: int, patience_s: float = 20.0, model: Path = folder, **options: object) -> GroupRunner:
            runner = load_group(str(model), ranks=ranks, patience_s=patience_s, **{**SIZES, **options})
            stack.callback(lambda pids: gone(pids), runner.rank_pids)
            stack.callback(runner.close)
            return runner

        yield start


def gone(pids: list[int]) -> None:
    assert not [pid for pid in pids if exists(pid)]


@dataclass(slots=True)
class OtherHost:
    """Where the other host's program runs, and the address of this process as it sees it."""

    directory: Path
    address: str
    command: Callable[[list[str]], list[str]]
    device: str = ""  # by which this process reaches it; empty: it is on this one's own network
    own_address: str = ""
    programs: list[Process] = field(default_factory=list)

    def follow(self, flags: list[str], hosts: int = 2, program: type[Process] = NurseryProcess) -> HostPlace:
        """Starts the program there, as each host but the front's. Returns the place of this process, which is that."""
        with socket.create_server((self.address, 0)) as probe:
            port = probe.getsockname()[1]
        words = [f"MASTER_ADDR={self.address}", f"MASTER_PORT={port}", f"WORLD_SIZE={hosts}"]
        follower = [sys.executable, "-m", "gpu_worker", "--launcher", "torchrun", *flags]
        for host in range(1, hosts):
            command = self.command(["/usr/bin/env", *words, f"RANK={host}", *follower])
            self.programs.append(program("follower", command, self.directory / f"follower{host}.log", ROOT))
            self.programs[-1].start()
        return HostPlace(0, hosts, Endpoint(self.address, port))

    def cut(self) -> None:
        run("ip", "link", "set", self.device, "down")

    def heal(self) -> None:
        run("ip", "link", "set", self.device, "up")
        run("ip", "route", "replace", self.own_address, "dev", self.device, "src", self.address)


@pytest.fixture(scope="module")
def other_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherHost]:
    directory = tmp_path_factory.mktemp("hosts")
    if why_none():
        yield OtherHost(directory, "127.0.0.2", lambda words: words)
        return
    with network_hosts(directory) as hosts, lasting(lambda: [host.pid for host in hosts.hosts]):
        prefix = os.getpid() % 250 + 1
        first = hosts.hosts[0]
        yield OtherHost(directory, f"10.213.{prefix}.101", lambda w: first.command(w), f"oct{prefix}h0", first.ipv4)


@pytest.fixture
def two_hosts(
    other_host: OtherHost, folder: Path, forked_ranks: None
) -> Iterator[Callable[..., tuple[GroupRunner, Process]]]:
    """Starts a group of so many ranks. Nothing of it is left when the test ends."""
    runners: list[GroupRunner] = []

    def start(
        ranks: int,
        flags: list[str],
        tls: ListenerTls | None = None,
        patience_s: float = 20.0,
        model: Path = folder,
        hosts: int = 2,
        tap: Callable[[HostStreams], None] = lambda _: None,
        program: type[Process] = NurseryProcess,
        **options: object,
    ) -> tuple[GroupRunner, Process]:
        streams = meet_hosts(other_host.follow(flags, hosts, program), tls)
        tap(streams)
        given: dict[str, Any] = {**SIZES, **options}
        runners.append(load_group(str(model), ranks=ranks, streams=streams, patience_s=patience_s, **given))
        return runners[-1], other_host.programs[-1]

    yield start
    for runner in runners:
        runner.close()
    for program in other_host.programs:
        wait_until(lambda program=program: not program.running, 30, f"a follower stays: {program.tail()}")
    other_host.programs.clear()
