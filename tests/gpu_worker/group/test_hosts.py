"""A group on two hosts, of which the other one is a network namespace: it says what one process says, to the bit, and
ends as one worker, whatever of it ends.
"""

import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import random_models
from certificates import Certificates
from effort import some
from folder_llama import folder_llama, save_bytes_tokenizer
from guard.processes import exists, ranks_of, state_of
from live.network_hosts import why_none
from live.process import Process, wait_until

from gpu_worker import LLM, SamplingParams
from gpu_worker.group.group_runner import GroupRunner
from gpu_worker.group.hosts.host_streams import HostStreams
from gpu_worker.group.rank_watch import RankFailed
from gpu_worker.running.loading import load_runner
from gpu_worker.steps.runner import Runner

from .conftest import SIZES
from .test_blocks import blocks_of, check_blocks_travel
from .test_same_bits import adapters, outputs

pytestmark = pytest.mark.timeout(300)  # programs import torch, and others may need the cores
LONG = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)


def test_two_hosts_compute_the_bits_of_one_process(two_hosts, folder, tmp_path):
    """Over TLS. Blocks are too few, so that some are swapped: what comes back is the same on both hosts."""
    certificates, loras = Certificates(tmp_path), adapters(folder, tmp_path)
    expected = outputs(load_runner(str(folder), **SIZES, kv_cache_dtype="int8"), folder, loras)
    runner, _ = two_hosts(4, certificates.flags("worker"), certificates.files("worker"), kv_cache_dtype="int8")
    states = runner.rank_states
    assert [state.rank for state in states] == [0, 1, 2, 3]
    assert outputs(runner, folder, loras) == expected


@pytest.mark.parametrize("kind", some(["Olmoe", "Qwen2Moe", "GptOss"], ["Olmoe"]))
def test_two_hosts_share_experts(two_hosts, folders, tmp_path, kind):
    """And heads that are normed together."""
    folder = folders(kind)
    loras = adapters(folder, tmp_path)
    expected = outputs(load_runner(str(folder), **SIZES), folder, loras)
    runner, _ = two_hosts(2, ["--insecure"], model=folder)
    assert outputs(runner, folder, loras) == expected


@pytest.mark.parametrize(
    ("kind", "ranks", "stages", "hosts", "options"),
    [
        ("Falcon", 4, 1, 2, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        ("GPTNeo", 1, 2, 2, {"dtype": "float32", "threads": 2}),
        pytest.param("Mpt", 2, 2, 2, {"dtype": "float16"}, marks=pytest.mark.long),  # a stage of two ranks on each
        pytest.param("Bloom", 2, 2, 4, {}, marks=pytest.mark.long),  # two hosts for each stage
        pytest.param("GPTJ", 1, 3, 3, {"kv_cache_dtype": "fp8_e4m3"}, marks=pytest.mark.long),
        pytest.param("GPT2", 2, 4, 2, {"dtype": "bfloat16"}, marks=pytest.mark.long),  # two stages on each
    ],
)
def test_hosts_compute_the_bits_of_one_process_of_a_model_like_gpt(
    two_hosts: Callable[..., tuple[GroupRunner, Process]],
    tmp_path: Path,
    kind: str,
    ranks: int,
    stages: int,
    hosts: int,
    options: dict[str, object],
) -> None:
    """Its steps are called op by op: each exchange of columns is a call of its own."""
    config = random_models.random_gpt(random.Random(kind), kind)
    if kind != "GPTNeo":  # whose layers are of two kinds
        config.num_hidden_layers = 4
    folder = random_models.save_random(config, tmp_path / "model")
    save_bytes_tokenizer(folder)
    sizes: dict[str, Any] = {**SIZES, "kv_cache_bytes": SIZES["kv_cache_bytes"] * 2, **options}
    expected = outputs(load_runner(str(folder), **sizes), folder)
    runner, _ = two_hosts(ranks, ["--insecure"], stages=stages, hosts=hosts, model=folder, **sizes)
    assert [state.rank for state in runner.rank_states] == [*range(ranks * stages)]
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
    loras = adapters(folder, tmp_path)
    expected = outputs(load_runner(str(folder), **sizes), folder, loras)
    runner, _ = two_hosts(ranks, ["--insecure"], stages=stages, hosts=hosts, model=folder, **sizes)
    assert [state.rank for state in runner.rank_states] == [*range(ranks * stages)]
    assert outputs(runner, folder, loras) == expected


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
    runner, follower = two_hosts(2, ["--insecure"], program=Process)
    (rank,) = ranks_of(follower.pid)
    runner._watch.close()  # as the front does when it ends
    wait_until(lambda: not follower.running, 30, "the follower stays")
    assert state_of(rank) == ""


@pytest.mark.parametrize(
    ("kind", "ranks", "stages"),
    some([("llama", 2, 1), ("llama", 1, 2), ("GPT2", 2, 1), ("Falcon", 1, 2)], [("llama", 1, 2), ("GPT2", 2, 1)]),
)
def test_what_another_worker_wrote_is_on_all_hosts(
    two_hosts: Callable[..., tuple[GroupRunner, Process]],
    folders: Callable[[str], Path],
    kind: str,
    ranks: int,
    stages: int,
) -> None:
    """The front has its ranks mirror what it has written outside of a step."""
    folder = folders(kind)
    runner, _ = two_hosts(ranks, ["--insecure"], stages=stages, swap_bytes=0, model=folder)
    check_blocks_travel(load_runner(str(folder), **{**SIZES, "swap_bytes": 0}), runner, folder)


SHAPES = [("llama", 2, 1), ("llama", 1, 2), ("GPT2", 2, 1), ("GPT2", 1, 2)]
USUALLY_LOST = [("host", "llama", 2, 1), ("network", "llama", 1, 2), ("host", "GPT2", 2, 1)]


@pytest.mark.parametrize(
    ("lost", "kind", "ranks", "stages"),
    some([(lost, *shape) for lost in ("host", "rank", "network") for shape in SHAPES], USUALLY_LOST),
)
def test_a_host_that_is_lost_ends_the_group(two_hosts, other_host, folders, lost, kind, ranks, stages):
    folder = folders(kind)
    runner, follower = two_hosts(ranks, ["--insecure"], stages=stages, patience_s=1.0, model=folder)
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
