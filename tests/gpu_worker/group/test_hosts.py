"""A group on two hosts, of which the other one is a network namespace: it says what one process says, to the bit, and
ends as one worker, whatever of it ends.
"""

import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificates
from effort import some
from folder_llama import folder_llama
from guard.processes import exists, lasting, ranks_of, state_of
from live.network_hosts import network_hosts, run, why_none
from live.process import Process, wait_until

from gpu_worker import LLM, SamplingParams
from gpu_worker.group.group_runner import GroupRunner
from gpu_worker.group.hosts.host_streams import HostPlace, HostStreams, meet_hosts
from gpu_worker.group.loading import load_group
from gpu_worker.group.rank_watch import RankFailed
from gpu_worker.running.loading import load_runner
from gpu_worker.steps.runner import Runner
from octavo.net.security.listener_tls import ListenerTls
from octavo.wire.endpoint import Endpoint

from .conftest import SIZES
from .test_blocks import blocks_of, check_blocks_travel
from .test_same_bits import outputs

pytestmark = pytest.mark.timeout(300)  # programs import torch, and others may need the cores
ROOT = Path(__file__).resolve().parents[3]
LONG = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)


@dataclass(slots=True)
class OtherHost:
    """Where the other host's program runs, and the address of this process as it sees it."""

    directory: Path
    address: str
    command: Callable[[list[str]], list[str]]
    device: str = ""  # by which this process reaches it; empty: it is on this one's own network
    own_address: str = ""
    programs: list[Process] = field(default_factory=list)

    def follow(self, flags: list[str], hosts: int = 2) -> HostPlace:
        """Starts the program there, as each host but the front's. Returns the place of this process, which is that."""
        with socket.create_server((self.address, 0)) as probe:
            port = probe.getsockname()[1]
        words = [f"MASTER_ADDR={self.address}", f"MASTER_PORT={port}", f"WORLD_SIZE={hosts}"]
        program = [sys.executable, "-m", "gpu_worker", "--launcher", "torchrun", *flags]
        for host in range(1, hosts):
            command = self.command(["/usr/bin/env", *words, f"RANK={host}", *program])
            self.programs.append(Process("follower", command, self.directory / f"follower{host}.log", ROOT))
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
def two_hosts(other_host: OtherHost, folder: Path) -> Iterator[Callable[..., tuple[GroupRunner, Process]]]:
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
        **options: object,
    ) -> tuple[GroupRunner, Process]:
        streams = meet_hosts(other_host.follow(flags, hosts), tls)
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


def test_two_hosts_compute_the_bits_of_one_process(two_hosts, folder, tmp_path):
    """Over TLS. Blocks are too few, so that some are swapped: what comes back is the same on both hosts."""
    certificates = Certificates(tmp_path)
    expected = outputs(load_runner(str(folder), **SIZES, kv_cache_dtype="int8"), folder)
    runner, _ = two_hosts(4, certificates.flags("worker"), certificates.files("worker"), kv_cache_dtype="int8")
    states = runner.rank_states
    assert [state.rank for state in states] == [0, 1, 2, 3]
    assert outputs(runner, folder) == expected


@pytest.mark.parametrize("kind", some(["Olmoe", "Qwen2Moe", "GptOss"], ["Olmoe"]))
def test_two_hosts_share_experts(two_hosts, folders, kind):
    """And heads that are normed together."""
    folder = folders(kind)
    expected = outputs(load_runner(str(folder), **SIZES), folder)
    runner, _ = two_hosts(2, ["--insecure"], model=folder)
    assert outputs(runner, folder) == expected


@pytest.mark.parametrize(
    ("ranks", "stages", "hosts", "options"),
    [
        (1, 2, 2, {"dtype": "float32", "threads": 2}),
        pytest.param(2, 4, 2, {"quantization": "q8", "kv_cache_dtype": "int8"}, marks=pytest.mark.long),  # two on each
        pytest.param(1, 3, 3, {"dtype": "float32"}, marks=pytest.mark.long),
        pytest.param(2, 2, 4, {"dtype": "float32"}, marks=pytest.mark.long),  # two hosts for each stage
    ],
)
def test_stages_on_several_hosts_compute_the_bits_of_one_process(
    two_hosts: Callable[..., tuple[GroupRunner, Process]],
    tmp_path: Path,
    ranks: int,
    stages: int,
    hosts: int,
    options: dict[str, object],
) -> None:
    """Blocks are too few, so that some are swapped, and steps are short, so that prompts come in pieces."""
    folder = folder_llama(tmp_path / "model", num_hidden_layers=5)
    sizes: dict[str, Any] = {**SIZES, "kv_cache_bytes": SIZES["kv_cache_bytes"] * 5 // 3, **options}
    expected = outputs(load_runner(str(folder), **sizes), folder)
    runner, _ = two_hosts(ranks, ["--insecure"], stages=stages, hosts=hosts, model=folder, **sizes)
    assert [state.rank for state in runner.rank_states] == [*range(ranks * stages)]
    assert outputs(runner, folder) == expected


class FrameTap:
    """Stands in the stream of columns to the other host, and notes the frames of slots that come from there."""

    HEAD, SLOTS = struct.Struct("=IIq"), 5  # kind, number, bytes

    def __init__(self) -> None:
        self.slots: list[int] = []  # bytes of each frame
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __call__(self, streams: HostStreams) -> None:
        far = streams.columns[1]
        streams.columns[1], near = socket.socketpair()
        self._sockets += [near, far]
        head, left = b"", 0

        def note(data: bytes) -> None:
            nonlocal head, left
            while data:
                if left:
                    left, data = max(0, left - len(data)), data[left:]
                    continue
                lacking = self.HEAD.size - len(head)
                head, data = head + data[:lacking], data[lacking:]
                if len(head) == self.HEAD.size:
                    kind, _, left = self.HEAD.unpack(head)
                    self.slots += [left] if kind == self.SLOTS else []
                    head = b""

        def pump(source: socket.socket, to: socket.socket, note: Callable[[bytes], None]) -> None:
            with suppress(OSError):
                while data := source.recv(1 << 18):
                    note(data)
                    to.sendall(data)
            for each in (source, to):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

        for way in ((near, far, lambda _: None), (far, near, note)):
            self._threads.append(threading.Thread(target=pump, args=way))
            self._threads[-1].start()

    def close(self) -> None:
        """After both ends."""
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        for each in self._sockets:
            each.close()


@pytest.fixture
def tap() -> Iterator[FrameTap]:
    made = FrameTap()
    yield made
    made.close()


def said_of_long_prompts(runner: Runner, folder: Path) -> list[Any]:
    """Of prompts of 500 and of 1100 tokens, and then the blocks."""
    llm = LLM(str(folder), runner=runner, max_batch_tokens=1200, prefix_caching=False)
    params, said = SamplingParams(temperature=0, max_tokens=2, logprobs=1, ignore_eos=True), []
    for length in (500, 1100):
        prompt = {"prompt_token_ids": [(i * 7 + length) % 250 for i in range(length)]}
        (answer,) = llm.generate([prompt], params, use_tqdm=False)
        said.append((answer.outputs[0].token_ids, answer.outputs[0].logprobs))
    return [*said, blocks_of(runner)]


@pytest.mark.parametrize(
    ("ranks", "stages", "layers"),
    [
        (2, 1, [[2, 2, 1], [5], [1, 1, 1, 1, 1], [5]]),  # of half of the heads
        pytest.param(1, 2, [[2, 1], [3], [1, 1, 1], [3]], marks=pytest.mark.long),
    ],
)
def test_what_a_long_step_writes_comes_in_several_frames(
    tap: FrameTap,  # which ends after the hosts
    two_hosts: Callable[..., tuple[GroupRunner, Process]],
    tmp_path: Path,
    ranks: int,
    stages: int,
    layers: list[list[int]],
) -> None:
    """Of as many layers as 4 MiB hold, or of one. The front's blocks are then those of one process, to the bit.

    `layers` are those of each frame in the steps of a prompt of 500 tokens, of its output, and of one of 1100 tokens.
    """
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    folder = folder_llama(tmp_path / "model", num_hidden_layers=5, head_dim=128, **shape)
    layer_bytes = 2 * 4 * 128 * 4  # of a token
    sizes: dict[str, Any] = {**SIZES, "dtype": "float32", "swap_bytes": 0, "max_batch_tokens": 1200}
    sizes["kv_cache_bytes"] = 128 * 16 * 5 * layer_bytes
    expected = said_of_long_prompts(load_runner(str(folder), **sizes), folder)
    runner, _ = two_hosts(ranks, ["--insecure"], stages=stages, model=folder, tap=tap, **sizes)
    assert said_of_long_prompts(runner, folder) == expected
    steps = zip((500, 1, 1100, 1), layers, strict=True)
    assert tap.slots == [each * tokens * layer_bytes // ranks for tokens, frames in steps for each in frames]


def test_a_host_that_ends_leaves_no_zombie(two_hosts: Callable[..., tuple[GroupRunner, Process]]) -> None:
    """Who would inherit it may reap nothing, as Ray's daemons and some first processes of containers do."""
    runner, follower = two_hosts(2, ["--insecure"])
    (rank,) = ranks_of(follower.pid)
    runner._watch.close()  # as the front does when it ends
    wait_until(lambda: not follower.running, 30, "the follower stays")
    assert state_of(rank) == ""


@pytest.mark.parametrize(("ranks", "stages"), some([(2, 1), (1, 2)], [(1, 2)]))
def test_what_another_worker_wrote_is_on_all_hosts(
    two_hosts: Callable[..., tuple[GroupRunner, Process]], folder: Path, ranks: int, stages: int
) -> None:
    """The front has its ranks mirror what it has written outside of a step."""
    runner, _ = two_hosts(ranks, ["--insecure"], stages=stages, swap_bytes=0)
    check_blocks_travel(load_runner(str(folder), **{**SIZES, "swap_bytes": 0}), runner, folder)


USUALLY_LOST = [("host", 2, 1), ("network", 1, 2)]


@pytest.mark.parametrize(
    ("lost", "ranks", "stages"),
    some([(lost, *shape) for lost in ("host", "rank", "network") for shape in ((2, 1), (1, 2))], USUALLY_LOST),
)
def test_a_host_that_is_lost_ends_the_group(two_hosts, other_host, folder, lost, ranks, stages):
    runner, follower = two_hosts(ranks, ["--insecure"], stages=stages, patience_s=1.0)
    there = ranks_of(follower.pid)
    assert len(there) == 1
    if lost == "network" and not other_host.device:
        pytest.skip(why_none())
    if lost == "network":
        other_host.cut()
    elif lost == "host":
        follower.kill()
    else:
        os.kill(there[0], signal.SIGKILL)
    began = time.monotonic()
    try:
        with pytest.raises(RankFailed, match=r"rank 1 \(pid \d+ on .*\)|host 1"):
            LLM(str(folder), runner=runner).generate("a", LONG, use_tqdm=False)
        assert time.monotonic() - began < 10
        wait_until(lambda: not any(map(exists, there)), 10, "a rank stays")
    finally:
        if lost == "network":
            other_host.heal()
