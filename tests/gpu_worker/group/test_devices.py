"""A group whose ranks have a device each, rehearsed: CPUs pretend to be GPUs, and gloo to be NCCL.

Ops are those of the extension on a CPU, whose products sum each row in one order, as a GPU's do with batch_invariant.
"""

import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from effort import some
from guard.processes import ranks_of

from gpu_worker import LLM, SamplingParams
from gpu_worker.group import device_group
from gpu_worker.group.device_group import refuse_on_devices
from gpu_worker.group.loading import load_group
from gpu_worker.group.rank_watch import RankFailed
from gpu_worker.models.decoders.llama import LlamaDecoder
from gpu_worker.models.decoders.ranks.device_team import COPY, SWAP_IN, SWAP_OUT, DeviceTeam
from gpu_worker.models.decoders.ranks.place import TeamBroken
from gpu_worker.models.loading import load_options
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running import loading
from gpu_worker.running.loading import load_runner
from gpu_worker.running.model_runner import ModelRunner
from gpu_worker.running.rank_sizing import REHEARSED_BYTES
from octavo.request.errors import InvalidArgument

from .conftest import SIZES
from .test_blocks import blocks_of, check_blocks_travel
from .test_death import expect_the_end, lose_in_a_step
from .test_same_bits import outputs

MIXTURES = ("Qwen2Moe", "Olmoe", "Mixtral", "Glm4Moe")
REHEARSED = {"rehearsal": "native", "dtype": "float32"}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    """Loads one process that computes op by op, as ranks with devices do."""

    def load(folder: Path, **options: object) -> ModelRunner:
        with monkeypatch.context() as patch:
            patch.setattr(load_options.native_llama, "find_obstacle", lambda config: "op by op")
            return load_runner(str(folder), **{**SIZES, "dtype": "float32", **options})

    return load


@pytest.mark.timeout(600)  # gloo goes from process to process a dozen times a step: slow where cores are few and busy
@pytest.mark.parametrize(
    ("kind", "ranks", "options"),
    [
        ("llama", 2, {"kv_cache_dtype": "int8"}),  # three KV heads: shares are uneven
        ("GPTJ", 2, {}),
        pytest.param("Qwen2Moe", 2, {}, marks=pytest.mark.long),  # a shared expert with a gate
        pytest.param("Olmoe", 2, {}, marks=pytest.mark.long),  # queries and keys of all heads are normed together
        pytest.param("Mixtral", 3, {"dtype": "bfloat16"}, marks=pytest.mark.long),
        pytest.param("Glm4Moe", 2, {}, marks=pytest.mark.long),  # a layer without experts, and a shared one
        pytest.param("llama", 3, {}, marks=pytest.mark.long),
        pytest.param("Bloom", 2, {"kv_cache_dtype": "fp8_e4m3"}, marks=pytest.mark.long),
        pytest.param("Mpt", 4, {}, marks=pytest.mark.long),
    ],
)
def test_a_group_of_devices_computes_the_bits_of_one(group, folders, alone, kind, ranks, options, monkeypatch):
    """Sequences are swapped out and in, share prefixes, fork, are scored and constrained."""
    folder = folders(kind, 5 if kind in MIXTURES else 3)  # with as many KV heads as ranks, at least
    options["kv_cache_bytes"] = 16 * alone(folder, **options).info.bytes_per_block
    one = alone(folder, **options)
    expected = outputs(one, folder, preemption="swap")
    several = group(ranks, model=folder, **{**REHEARSED, **options})
    assert several.info == replace(one.info, lora_support=several.info.lora_support)
    assert several.info.lora_support.refusal
    orders, give = set[int](), DeviceTeam.order_move

    def noted(team: DeviceTeam, order: int, pairs: Sequence[tuple[int, int]]) -> int:
        orders.add(order)
        return give(team, order, pairs)

    monkeypatch.setattr(DeviceTeam, "order_move", noted)
    assert outputs(several, folder, preemption="swap") == expected
    assert {SWAP_OUT, SWAP_IN, COPY} <= orders


@pytest.mark.parametrize("kind", some(["llama", "GPT2"], ["llama"]))
def test_whole_blocks_come_and_go_between_a_group_of_devices_and_one(group, folders, alone, kind):
    """Also while others are read beside the steps."""
    several = group(2, model=folders(kind), swap_bytes=0, **REHEARSED)
    assert several.block_memory.bytes_per_block  # it is asked for before the first step
    ended = threading.Event()

    def read() -> int:
        num_read = 0
        while not ended.is_set():
            num_read += len(blocks_of(several))
        return num_read

    with ThreadPoolExecutor(1) as executor:
        reading = executor.submit(read)
        try:
            check_blocks_travel(alone(folders(kind), swap_bytes=0), several, folders(kind))
        finally:
            ended.set()
    assert reading.result() > several.info.num_blocks


@pytest.mark.parametrize("signal_", some([signal.SIGKILL, signal.SIGSTOP], [signal.SIGKILL]))
def test_a_rank_with_a_device_that_is_lost_in_a_step_ends_the_group(group, folder, signal_, monkeypatch):
    says = "killed by signal 9" if signal_ == signal.SIGKILL else r"rank 1 (\(pid \d+\) )?has"
    runner = group(3, patience_s=0.5, **REHEARSED)
    llm = LLM(str(folder), runner=runner)
    llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    lose_in_a_step(monkeypatch, runner, runner.rank_pids[0], signal_)
    expect_the_end(llm, runner, says)


def test_a_rank_with_a_device_that_is_lost_while_blocks_are_read_fails_who_waits(group, folder):
    runner = group(2, patience_s=0.5, **REHEARSED)
    memory = runner.block_memory
    os.kill(runner.rank_pids[0], signal.SIGKILL)
    with pytest.raises(TeamBroken), memory.read_blocks([0]) as contents:
        list(contents)


@pytest.mark.parametrize("where", ["_mlp", "own_logits"])
def test_a_front_that_fails_in_a_step_ends_the_group(group, folder, monkeypatch, where):
    """Others wait for its columns, and it for nobody: no later step may find them in the middle of this one."""
    runner = group(2, patience_s=0.5, **REHEARSED)
    llm = LLM(str(folder), runner=runner)
    llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)

    def fail(*_: object) -> None:
        raise MemoryError("none is left")

    with monkeypatch.context() as patch:
        patch.setattr(LlamaDecoder, where, fail)
        with pytest.raises((RankFailed, MemoryError)):
            llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(RankFailed):
        runner.check_device()


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_with_a_device_that_cannot_start_is_named_with_its_reason(folder, monkeypatch):
    """While the front waits for it: a rank that reads another model."""
    told = device_group.options_of_ranks
    monkeypatch.setattr(device_group, "options_of_ranks", lambda model, options: told(model + "-gone", options))
    with pytest.raises(RankFailed, match=r"rank 1 \(pid \d+\): .*-gone"):
        load_group(str(folder), ranks=2, patience_s=5.0, **{**SIZES, **REHEARSED})
    assert not ranks_of(os.getpid())


def test_a_group_that_fails_before_its_ranks_start_keeps_no_file_open(folder, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("too many files are open")

    monkeypatch.setattr(device_group, "options_of_ranks", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="too many"):
        load_group(str(folder), ranks=3, patience_s=5.0, **{**SIZES, **REHEARSED})
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_rank_with_the_least_room_decides_how_many_blocks_there_are(group, folder):
    """Which is measured beside the largest steps, which all ranks compute: rank 1 has two of three heads."""
    runner = group(2, kv_cache_bytes=None, context_tokens=128, gpu_memory_utilization=0.5, **REHEARSED)
    own_bytes = runner.info.bytes_per_block // 3 * 2
    assert runner.info.num_blocks == REHEARSED_BYTES // 2 // own_bytes
    assert LLM(str(folder), runner=runner).generate("a", SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.long
def test_a_group_whose_products_may_have_other_bits_has_a_class_of_its_own(group, folder, alone, monkeypatch):
    """As with cuBLAS. Other ranks compute the same tokens, as far as rounding does not tip a choice."""
    monkeypatch.setattr(loading, "choose_ops", lambda *_: ReferenceOps())
    one = alone(folder)
    several = group(2, **{**REHEARSED, "rehearsal": "reference"})
    assert several.info.numerics.split("/") == [
        *one.info.numerics.split("/")[:5],
        "ranks-2",
        *one.info.numerics.split("/")[5:],
    ]
    params = SamplingParams(temperature=0, max_tokens=12)
    said = [LLM(str(folder), runner=each).generate("A tale", params, use_tqdm=False) for each in (one, several)]
    assert said[0][0].outputs[0].token_ids == said[1][0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("kind", "ranks", "options", "says"),
    [
        (
            "llama",
            4,
            {},
            r"^tensor_parallel: a GPU keeps whole KV heads, of which this model has 3: give no",
        ),
        ("GptOss", 2, {}, r"^tensor_parallel: block-sparse attention, sinks and experts with biases are not divided"),
        ("llama", 2, {"quantization": "q8"}, r"^quantization: q8 needs native ops on a CPU"),
        ("llama", 2, {"quantization": "kept"}, r"^quantization: kept weights are not divided between GPUs: say auto"),
        ("llama", 2, {"stages": 2}, r"^pipeline_parallel: GPUs have no stages: leave it out, or say --device cpu"),
    ],
)
def test_what_devices_do_not_divide_is_refused(folders, kind, ranks, options, says):
    with pytest.raises(InvalidArgument, match=says):
        load_group(str(folders(kind)), ranks=ranks, patience_s=5.0, **{**SIZES, **REHEARSED, **options})


def test_the_gpus_of_a_group_are_there_and_on_one_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InvalidArgument, match=r"^tensor_parallel: 2 ranks have a GPU each, .*: give .* --device cpu$"):
        load_group("smollm2", ranks=2, patience_s=1.0, **{**SIZES, "device": "cuda:0"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refuse_on_devices(2, 1, 1, "cuda", "")
    with pytest.raises(InvalidArgument, match=r"^tensor_parallel: 3 ranks have a GPU each, and there are 2: give"):
        refuse_on_devices(3, 1, 1, "cuda:0", "")
    with pytest.raises(InvalidArgument, match=r"^device: ranks take cuda:0 to cuda:1, and cuda:1 says otherwise"):
        refuse_on_devices(2, 1, 1, "cuda:1", "")
    with pytest.raises(InvalidArgument, match=r"^launcher: the GPUs of a group are on one host"):
        refuse_on_devices(2, 1, 2, "cuda", "")
