"""A history that another worker computes again, as a prompt in any pieces, goes on with the bits of its decodes.

Every op of a model is part of it, past the number of keys from which attention is split: what a step computes for a
token must depend neither on how many tokens the step has nor on which.
"""

import random
from collections.abc import Callable

import pytest
import torch
from effort import diagonal
from instruction_sets import ISAS
from span_batches import batch_of_spans
from transformers_types import LATENTS, MIXTURES, SCALES, SMALL

from gpu_worker.ops import native
from gpu_worker.running.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(native.load() is None, reason="the reference ops round by the batch's shape")
SPLIT, DECODED = 1024, 40
CONTEXT = SPLIT + DECODED + 8
ODD = {"intermediate_size": 44, "vocab_size": 131}  # nothing fills whole registers
FAR = {"max_position_embeddings": CONTEXT}
LLAMA = {**SMALL, **FAR, "num_hidden_layers": 2}
ENDS = {"eos_token_id": None, "bos_token_id": None}
GPT = {"vocab_size": 131, "n_positions": CONTEXT, "n_embd": 40, "n_inner": 44, "n_layer": 2, "n_head": 5, **ENDS}
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", LLAMA),
    "llama-odd": ("Llama", {**LLAMA, **ODD, "attention_bias": True, "mlp_bias": True}),
    "llama-sparse": (
        "Llama",
        {**LLAMA, "blocksparse_block_size": 64, "blocksparse_num_local_blocks": 2, "blocksparse_vert_stride": 3},
    ),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": SPLIT - 3, "head_dim": 16}),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 16}),
    "gemma2": ("Gemma2", {**LLAMA, **ODD, "head_dim": 16, "sliding_window": 700, "query_pre_attn_scalar": 20}),
    "gemma3": (
        "Gemma3Text",
        {**LLAMA, **ODD, "head_dim": 16, "sliding_window": 700, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "olmo3": ("Olmo3", {**LLAMA, **ODD, "sliding_window": 700, "layer_types": ["sliding_attention", "full_attention"]}),
    "granite": ("Granite", {**LLAMA, **SCALES}),
    "experts": ("Qwen2Moe", {**MIXTURES["qwen2_moe-some"][1], **FAR}),
    "experts-odd": ("Qwen3Moe", {**MIXTURES["qwen3_moe-many"][1], **ODD, **FAR}),
    "grouped": ("Glm4Moe", {**MIXTURES["glm4_moe-grouped"][1], **FAR}),
    "latent": ("DeepseekV3", {**LATENTS["deepseek_v3-grouped"][1], **FAR, "qk_nope_head_dim": 32}),
    "latent-plain": ("DeepseekV2", {**LATENTS["deepseek_v2-lite"][1], **ODD, **FAR, "num_hidden_layers": 2}),
    "latent-scaled": ("MiniCPM3", {**LATENTS["minicpm3-biased"][1], **ODD, **FAR, "num_hidden_layers": 2}),
    "sinks": ("GptOss", {**MIXTURES["gpt_oss-many"][1], **ODD, **FAR, "num_hidden_layers": 2}),
    "gpt2": ("GPT2", GPT),
    "gpt2-silu": ("GPT2", {**GPT, "activation_function": "silu"}),
    "bloom": ("Bloom", {"vocab_size": 131, "hidden_size": 48, "n_layer": 2, "n_head": 6, **ENDS}),
}
FORMS = [
    *((name, {}) for name in MODELS),
    *((name, {"dtype": "bfloat16"}) for name in ("llama", "experts", "sinks", "gemma3", "gpt2")),
    ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "float32"}),
    ("llama", {"dtype": "float16"}),
    ("llama", {"quantization": "q8", "kv_cache_dtype": "int8"}),
    ("llama", {"quantization": "q4", "kv_cache_dtype": "fp8_e4m3"}),
    ("llama-odd", {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"}),
    ("mistral", {"quantization": "q4-a8"}),
    ("qwen3", {"kv_cache_dtype": "bfloat16"}),
    ("gemma2", {"quantization": "q4", "kv_cache_dtype": "int8"}),
    ("gemma3", {"quantization": "q8-a8"}),
    ("experts", {"quantization": "q4-a8"}),
    ("latent", {"dtype": "bfloat16"}),
    ("latent", {"quantization": "q8", "kv_cache_dtype": "int8"}),
    ("latent", {"quantization": "q4-a8", "kv_cache_dtype": "fp8_e4m3"}),
]
Steps = list[list[tuple[int, int, int]]]  # of each step: (sequence, first token, end)


@pytest.fixture
def replayed(tiny, load) -> Callable[..., ModelRunner]:
    def load_long(name: str, **options) -> ModelRunner:
        model = tiny(f"replayed-{name}", *MODELS[name]).directory
        return load(model, context_tokens=CONTEXT, batch_invariant=True, **options)

    return load_long


def logits_of(runner: ModelRunner, sequences: list[list[int]], steps: Steps) -> list[dict[int, torch.Tensor]]:
    """Runs the steps: the logits of each sequence's tokens by position, as bits."""
    size, context = runner.info.block_size, max(map(len, sequences))
    width = -(-context // size)
    order = torch.randperm(runner.info.num_blocks).tolist()
    tables = [order[i * width : (i + 1) * width] for i in range(len(sequences))]
    found: list[dict[int, torch.Tensor]] = [{} for _ in sequences]
    for spans in steps:
        places, batch = batch_of_spans(sequences, spans, tables, size)
        rows = torch.tensor([row for row, (_, p) in enumerate(places) if p >= SPLIT - 4], dtype=torch.int64)
        with torch.inference_mode():
            logits = runner._decoder.logits(runner._decoder.forward(batch, runner._arena.layers, rows)).clone()
        assert logits.isfinite().all()
        for row, bits in zip(rows.tolist(), logits.view(torch.int32), strict=True):
            sequence, position = places[row]
            found[sequence][position] = bits
    return found


def decoded(length: int, sequence: int = 0) -> Steps:
    """A prompt, and then a step for each token."""
    prompt = SPLIT - 5
    return [[(sequence, 0, prompt)]] + [[(sequence, p, p + 1)] for p in range(prompt, length)]


def cut(rng: random.Random, length: int) -> Steps:
    """A prompt in pieces."""
    steps: Steps = []
    first = 0
    while first < length:
        end = min(length, first + rng.choice([1, 2, 3, 7, 16, 33, 64, 200, 500]))
        steps.append([(0, first, end)])
        first = end
    return steps


@pytest.mark.parametrize(("form", "isa"), diagonal(FORMS, ISAS), indirect=["isa"])
def test_a_replay_has_the_bits_of_decodes(form, isa, replayed):
    name, options = form
    runner = replayed(name, **options)
    rng = random.Random(len(name))
    torch.manual_seed(0)
    length = SPLIT + DECODED
    sequences = [[rng.randrange(128) for _ in range(length)] for _ in range(3)]
    expected = logits_of(runner, sequences[:1], decoded(length))[0]

    def check(steps: Steps) -> None:
        found = logits_of(runner, sequences, steps)[0]
        different = [position for position, bits in found.items() if not torch.equal(bits, expected[position])]
        assert not different and found.keys() == expected.keys()

    check([[(0, 0, length)]])
    check(cut(rng, length))
    last = length - 9  # a batch of decodes and prompts: the sequence's last tokens come with others before and behind
    check([[(0, 0, last), (1, 0, 300)], [(1, 300, 301), (0, last, length), (2, 0, 65)]])
