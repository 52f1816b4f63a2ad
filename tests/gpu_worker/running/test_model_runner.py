"""A real (tiny) model under the real scheduler: nothing about how a sequence is run may change what it says."""

import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from effort import diagonal
from instruction_sets import OPS
from scheduler_parts import SchedulerParts
from sequences import new_sequence
from steps import Piece, step_of
from tiny_llama import PROMPTS, drive, request, requests

from gpu_worker.ops import kv_format, native
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.running import loading
from gpu_worker.running.loading import load_runner
from gpu_worker.running.model_runner import ModelRunner
from gpu_worker.running.sizing import choose_device
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.steps.runner import RunnerInfo
from gpu_worker.steps.step_input import StepInput
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams
from octavo.request.step_item import StepItem

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

BLOCK = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A Mistral of transformers, so that windows take part. (Its type by name costs each process two seconds.)"""
    torch.manual_seed(3)
    config = transformers.MistralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=27, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return directory, model


@pytest.fixture
def make(model: tuple[Path, Any]) -> Callable[..., ModelRunner]:
    """A runner with this many blocks on the device and on the host."""
    shape = KvShape(num_layers=3, num_kv_heads=2, block_size=BLOCK, head_dim=8, dtype=torch.float32)

    def runner(num_blocks: int = 64, num_host_blocks: int = 64, kv_cache_dtype: str = "auto") -> ModelRunner:
        of = replace(shape, dtype=kv_format.DTYPES.get(kv_cache_dtype, torch.float32))
        sizes = {"kv_cache_bytes": num_blocks * of.bytes_per_block, "swap_bytes": num_host_blocks * of.bytes_per_block}
        return load_runner(str(model[0]), block_size=BLOCK, kv_cache_dtype=kv_cache_dtype, **sizes)

    return runner


@pytest.fixture(scope="module")
def known() -> dict[str, list[list[int]]]:
    """What `alone` has computed, by the ops that have computed it."""
    return {}


@pytest.fixture
def alone(
    make: Callable[..., ModelRunner], known: dict[str, list[list[int]]], request: pytest.FixtureRequest
) -> list[list[int]]:
    """The tokens of each prompt run alone, with nothing cached and nothing cut."""
    ops = request.node.callspec.params.get("on_ops", "") if hasattr(request.node, "callspec") else ""
    if ops not in known:
        known[ops] = drive(make(), requests(), max_batch_sequences=1, prefix_caching=False)[0]
    return known[ops]


def check_with_transformers(model: tuple[Path, Any], prompts: list[list[int]], outputs: list[list[int]]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model[1](torch.tensor([prompt + output]), use_cache=False).logits[0]
        assert output == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.usefixtures("on_ops")
def test_alone_is_transformers(alone, model):
    check_with_transformers(model, PROMPTS, alone)
    assert len({token for output in alone for token in output}) > 20


@pytest.mark.usefixtures("on_ops")
def test_nothing_that_happens_to_a_sequence_changes_its_tokens(make, alone):
    """Prompts in chunks at, above and across block boundaries, beside decodes; prefix hits; preemption."""
    for budget in (64, 16, 23):
        assert drive(make(), requests(), max_batch_tokens=budget, max_batch_sequences=6)[0] == alone
    again = [*requests(), *(request(10 + n, prompt) for n, prompt in enumerate(PROMPTS))]
    assert drive(make(), again, max_batch_sequences=1)[0] == alone + alone
    hits = [sequence.cached_tokens or 0 for sequence in again[len(PROMPTS) :]]
    assert hits == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS], "every full block but the last token's"
    for how in ("swap", "recompute"):
        outputs, load = drive(make(num_blocks=16), requests(), preemption=how)  # for six sequences that want 39
        assert outputs == alone
        assert (load.num_preempted_swap if how == "swap" else load.num_preempted_recompute) > 0


@pytest.mark.usefixtures("on_ops")
@pytest.mark.parametrize(("how", "on_ops"), diagonal(["swap", "recompute"], OPS), indirect=["on_ops"])
def test_blocks_out_of_the_window_are_given_back(make, model, how):
    """A context of 220 tokens on 5 blocks of 8; what is given back is spoiled with NaN, and nothing reads it."""
    prompts = [[(i * 37 + j * 11 + j * j) % 96 for j in range(length)] for i, length in enumerate((180, 3, 60))]

    def run(runner: ModelRunner, **config) -> list[list[int]]:
        sequences = [request(n, prompt, max_tokens=40) for n, prompt in enumerate(prompts)]
        return drive(runner, sequences, preemption=how, **config)[0]

    keeping = make(128)
    assert keeping.info.window == 27
    keeping._info = replace(keeping.info, window=0)
    kept = run(keeping, prefix_caching=False)
    small = make(num_blocks=5)
    assert small.info.max_sequence_blocks == 5
    assert small.info.context_tokens == 256, "all that the model was made for"
    for caching in (True, False):
        assert run(small, prefix_caching=caching) == kept
        assert run(make(num_blocks=11), prefix_caching=caching, max_batch_tokens=23, max_batch_sequences=6) == kept
    check_with_transformers(model, prompts, kept)


@pytest.mark.usefixtures("on_ops")
def test_the_repetition_penalty_is_that_of_transformers_whatever_happens_to_a_sequence(make, model):
    """It counts prompt and output: alone, after a swap, after a recomputation, and after a replay on another worker."""
    expected = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            found = model[1].generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=24,
                min_new_tokens=24,
                repetition_penalty=1.3,
            )
        expected.append(found[0, len(prompt) :].tolist())
    assert expected != drive(make(), requests())[0]
    assert drive(make(), requests(repetition_penalty=1.3))[0] == expected
    for how in ("swap", "recompute"):
        outputs, load = drive(make(num_blocks=16), requests(repetition_penalty=1.3), preemption=how)
        assert outputs == expected
        assert load.num_preempted_swap + load.num_preempted_recompute > 0
    params, rest = requests(repetition_penalty=1.3)[0].params, [output[:5] for output in expected]
    taken_over = [new_sequence(str(i), prompt, params, outputs=[rest[i]]) for i, prompt in enumerate(PROMPTS)]
    for item in items_of(make(), *taken_over):
        rest[int(item.seq_id)] = rest[int(item.seq_id)] + list(item.token_ids)
    assert rest == expected


def items_of(runner: ModelRunner, *sequences: Sequence, max_batch_tokens: int = 64) -> Iterator[StepItem]:
    config = SchedulerConfig(max_batch_tokens=max_batch_tokens, max_batch_sequences=16, debug=True)
    return SchedulerParts(config, runner.info).run_all(runner, *sequences)


def test_prompt_logprobs_in_chunks_are_those_of_transformers(make, model):
    prompt = PROMPTS[3]
    items = items_of(make(), request(1, prompt, prompt_logprobs=2, max_tokens=1), max_batch_tokens=16)
    scores = [score for item in items for score in item.prompt_scores]
    with torch.inference_mode():
        logprobs = model[1](torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    assert [score.token_id for score in scores] == prompt[1:]
    for position, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(logprobs[position, prompt[position + 1]]), abs=1e-4)
        assert [token for token, _ in score.top] == logprobs[position].topk(2).indices.tolist()


def test_blocks_move_in_the_order_a_plan_states(make):
    """Out, spoil, in, copy: block 0 goes out, is spoiled, comes back as block 5, and is copied to block 6."""
    runner = make(num_blocks=8, num_host_blocks=4)
    arena = runner._arena
    for layer in arena.layers:
        layer[0] = torch.randn_like(layer[0])
    expected = [layer[0].clone() for layer in arena.layers]
    runner.run(StepInput(1, swap_out=[(0, 2)], spoil=[0, 1], swap_in=[(2, 5)], copies=[(5, 6)]))
    for layer, content in zip(arena.layers, expected, strict=True):
        assert layer[0].isnan().all() and layer[1].isnan().all()
        assert torch.equal(layer[5], content) and torch.equal(layer[6], content)


def test_bad_logits_of_one_sequence_stay_its_own(make, alone):
    """NaN in one sequence's blocks ends that one with an error; the other's tokens are what they were."""
    runner = make()
    blocks = range(10), range(10, 20)
    prompts = PROMPTS[3], PROMPTS[0]
    runner.run(step_of([Piece(prompt, len(prompt), some) for prompt, some in zip(prompts, blocks, strict=True)], BLOCK))
    for layer in runner._arena.layers:
        layer[4] = float("nan")  # holds the newest tokens of the victim, inside its window
    newest = Piece([*prompts[0], 5], 1, blocks[0]), Piece([*prompts[1], alone[0][0]], 1, blocks[1])
    output = runner.run(step_of(newest, BLOCK))
    assert output.token_ids == [-1, alone[0][1]]


@pytest.mark.skipif(native.load() is None, reason="torch rounds by shape, which can move a key by a step")
@pytest.mark.parametrize("kind", ["float16", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_a_cache_in_fewer_bits_changes_nothing_of_this(make, kind):
    """Scales belong to their tokens: batches, chunks, prefix hits, swaps and recomputing leave every bit as it is."""
    alone = drive(make(kv_cache_dtype=kind), requests(), max_batch_sequences=1, prefix_caching=False)[0]
    assert drive(make(kv_cache_dtype=kind), requests(), max_batch_tokens=17, max_batch_sequences=6)[0] == alone
    for how in ("swap", "recompute"):
        outputs, load = drive(make(16, kv_cache_dtype=kind), requests(), preemption=how)
        assert outputs == alone
        assert (load.num_preempted_swap if how == "swap" else load.num_preempted_recompute) > 0
    info = make(kv_cache_dtype=kind).info
    assert info.kv_dtype == kind and f".{kind}" in info.layout


def test_a_score_of_an_earlier_chunk_is_refused(make):
    with pytest.raises(ValueError, match="cannot score position 8"):
        make().run(step_of([Piece(PROMPTS[0][:12], 4, [0, 1, 2], score_from=8)], BLOCK))


def test_sizes_follow_from_bytes(make, model, monkeypatch):
    info, of_a_block = make(num_blocks=4, num_host_blocks=5).info, 3 * 2 * 2 * BLOCK * 8 * 4
    assert (info.num_blocks, info.num_host_blocks, info.bytes_per_block) == (4, 5, of_a_block)
    assert info.context_tokens == make().info.context_tokens > 4 * BLOCK, "the model's: workers differ in memory alone"
    assert "float32" in info.layout and info.fingerprint == make().info.fingerprint
    monkeypatch.setattr(loading, "available_bytes", lambda: 1 << 30)

    def loaded(**options) -> RunnerInfo:
        return load_runner(str(model[0]), block_size=BLOCK, **options).info

    assert loaded(kv_cache_bytes=1 << 20).num_host_blocks == (1 << 30) // 10 // of_a_block
    assert loaded(kv_cache_bytes=1 << 20, swap_bytes=0).num_host_blocks == 0
    assert loaded().num_blocks == (1 << 28) // of_a_block, "a quarter of what is available, on a CPU"
    assert loaded(context_tokens=40).context_tokens == 40


def test_memory_for_blocks_is_zero_aligned_and_free_until_written():
    shape = KvShape(num_layers=4, num_kv_heads=2, block_size=16, head_dim=64, dtype=torch.bfloat16)
    before = resident_bytes()
    arena = shape.allocate_arena((1 << 28) // shape.bytes_per_block, torch.device("cpu"))
    assert resident_bytes() - before < 1 << 26, "a quarter of a GiB was taken"
    assert arena.numel() * arena.itemsize == 1 << 28
    assert arena.data_ptr() % 64 == 0 and arena.is_contiguous()
    arena[:, 1] = 1
    assert arena[:, 0].eq(0).all() and arena[:, 1].eq(1).all() and arena[:, 2].eq(0).all()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("kv_cache_bytes", 100), ("block_size", 12), ("block_size", 4)),
        *(("dtype", "float8"), ("device", "tpu"), ("kv_cache_dtype", "int4")),
    ],
)
def test_bad_options_are_named(model, option, value):
    with pytest.raises(InvalidArgument, match=option):
        load_runner(str(model[0]), **{option: value})


def test_which_gpu_is_always_said(monkeypatch):
    """Ops compare devices, and torch.device("cuda") is not the device of any tensor."""
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(InvalidArgument, match="no CUDA device"):
            choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cuda:1") == torch.device("cuda", 1) and choose_device("cpu") == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["swap", "recompute"])
def test_a_gpu_computes_the_same(model, alone, how):
    runner = load_runner(str(model[0]), device="cuda", dtype="float32", block_size=BLOCK, kv_cache_bytes=16 * 3072)
    assert drive(runner, requests(), preemption=how)[0] == alone


@pytest.mark.gpu
def test_a_gpu_is_measured(model):
    runner = load_runner(str(model[0]), device="cuda", dtype="float32", block_size=BLOCK)
    assert runner.info.num_blocks * runner.info.bytes_per_block > 1 << 30


def test_a_replay_in_the_middle_ranks_branches_as_if_nothing_had_happened(make):
    """best_of goes by the model's own log probabilities, which prompt and output alone decide."""
    params = SamplingParams(
        temperature=1.0, best_of=4, max_tokens=20, repetition_penalty=1.5, frequency_penalty=0.8,
        logit_bias={5: 3.0, 9: -4.0}, min_tokens=4, seed=11, ignore_eos=True,
    )  # fmt: skip

    def run(outputs: list[list[int]]) -> tuple[list[list[int]], dict[int, float]]:
        sequence = new_sequence("f" * 32, PROMPTS[3], params, outputs=outputs)
        found, scores = [list(output) for output in outputs], {}
        for item in items_of(make(), sequence, max_batch_tokens=16):
            found[item.branch] += item.token_ids
            if item.finish:
                scores[item.branch] = item.cumulative_logprob
        return found, scores

    whole, scores = run([[], [], [], []])
    assert len(set(scores.values())) == 4
    for cut in ([7, 7, 7, 7], [0, 1, 12, 19], [19, 3, 0, 8]):
        again, replayed = run([output[:end] for output, end in zip(whole, cut, strict=True)])
        assert again == whole
        assert replayed == pytest.approx(scores, rel=1e-5)
        assert sorted(replayed, key=replayed.get) == sorted(scores, key=scores.get)
