"""Tiny random models, saved as Transformers saves them, and a way to run them."""

import json
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from random_models import random_model
from safetensors.torch import load_file, save_file
from span_batches import batch_of_spans
from steps import Piece, step_of
from transformers_types import DENSE, LATENTS, MIXTURES, SMALL, TYPES

from gpu_worker.running.loading import load_runner
from gpu_worker.running.model_runner import ModelRunner

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

WIDE = {**SMALL, "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 256}  # rows of whole K blocks
ENDS = {"eos_token_id": None, "bos_token_id": None}
CAPPED = {**SMALL, "head_dim": 16, "sliding_window": 11, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
GEMMA2 = {**CAPPED, "query_pre_attn_scalar": 16}
GPT = {"vocab_size": 128, "n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, **ENDS}
PLAIN = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, **ENDS}
FALCON = {**PLAIN, "max_position_embeddings": 128}
NEW_FALCON = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
OLD_FALCON = {**FALCON, "parallel_attn": False}
SIX_HEADS = {"hidden_size": 48, "num_attention_heads": 6}
NEO_SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_layers": 4, "num_heads": 4}
BLOOM = {"vocab_size": 128, "hidden_size": 48, "n_layer": 3, "n_head": 6, **ENDS}
MPT = {"vocab_size": 128, "max_seq_len": 128, "d_model": 48, "n_layers": 3, "n_heads": 6, **ENDS}
LINEAR = {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}
SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
FACTORS = {"long_factor": [1.5, 2.5, 3.5, 4.5], "short_factor": [1.0, 1.05, 1.1, 1.2]}


def rope(more: dict = SMALL, **parameters: object) -> dict:
    return {**more, "rope_parameters": parameters}


# A model per variation that could go wrong by itself.
CONFIGS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", SMALL),
    "llama-llama3": ("Llama", rope(**SCALED, rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama-yarn": ("Llama", rope(**SCALED, rope_type="yarn")),
    "llama-linear": ("Llama", rope(**LINEAR)),
    "llama-dynamic": ("Llama", rope(rope_theta=1e4, rope_type="dynamic", factor=4.0)),
    "llama-biases": ("Llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**SMALL, "sliding_window": 13, "head_dim": 16}),
    "qwen2": ("Qwen2", {**SMALL, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 16}),
    "smollm3": ("SmolLM3", SMALL),
    "internlm3": ("InternLM3", {**SMALL, "head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("IQuestCoder", {**SMALL, "head_dim": 16, "sliding_window": 11}),
    "gpt2": ("GPT2", GPT),
    "gpt2-scaled-by-layer": ("GPT2", {**GPT, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-relu": ("GPT2", {**GPT, "activation_function": "relu"}),
    "opt": ("OPT", {**FALCON, "word_embed_proj_dim": 32, "ffn_dim": 48, "pad_token_id": None}),
    "gpt-neox": ("GPTNeoX", {**FALCON, "intermediate_size": 48}),
    "phi": ("Phi", SMALL),
    "gemma2-tied": ("Gemma2", GEMMA2),
    "gemma2-untied": ("Gemma2", {**GEMMA2, "tie_word_embeddings": False}),
    "phi3": ("Phi3", {**SMALL, "sliding_window": 11}),
    "phi3-tied": ("Phi3", {**SMALL, "partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "phi3-longrope": (
        "Phi3",
        rope({**SMALL, "original_max_position_embeddings": 32}, rope_theta=1e4, rope_type="longrope", **FACTORS),
    ),
    "llama-wide": ("Llama", WIDE),
    "phi3-wide": ("Phi3", WIDE),
    "gptj": ("GPTJ", {**GPT, "rotary_dim": 4}),
    "codegen": ("CodeGen", {**GPT, "n_embd": 64, "n_head": 8, "rotary_dim": 4}),
    "gpt-neo": (
        "GPTNeo",
        {**NEO_SIZES, **ENDS, "max_position_embeddings": 128, "window_size": 11}
        | {"attention_types": [[["global", "local"], 2]]},
    ),
    "bloom": ("Bloom", BLOOM),
    "bloom-normed-residual": (
        "Bloom",
        {**BLOOM, "hidden_size": 64, "n_layer": 2, "n_head": 8, "apply_residual_connection_post_layernorm": True},
    ),
    "falcon-7b": ("Falcon", FALCON),
    "falcon-40b": ("Falcon", NEW_FALCON),
    "falcon-11b": (
        "Falcon",
        {**NEW_FALCON, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 80, "tie_word_embeddings": False},
    ),
    "falcon-rw": ("Falcon", {**OLD_FALCON, **SIX_HEADS, "alibi": True, "bias": True, "multi_query": False}),
    "falcon-sequential": ("Falcon", {**rope(OLD_FALCON, **LINEAR), "activation": "relu"}),
    "mpt": ("Mpt", MPT),
    "mpt-clipped": ("Mpt", {**MPT, "n_heads": 8, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.25}}),
}


class Tiny:
    """A random model: in memory for reference, on disk for us."""

    def __init__(self, name: str, kind: str, options: dict, directory: Path) -> None:
        self.directory = directory / name
        config = getattr(transformers, f"{kind}Config")(**options)
        self.model = random_model(config, seed=len(name.rpartition(" ")[2]))  # without the word before a name
        self.model.save_pretrained(self.directory)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """The logits that Transformers computes, for every position."""
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0]

    def greedily(self, prompt: list[int], output: list[int]) -> list[int]:
        """The tokens that Transformers computes after the prompt and each token of the output. If all tokens are its
        argmax given those before them, they are what greedy generation yields."""
        return self.logits(prompt + output)[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """Tiny models by name, each made once: of CONFIGS and transformers_types, or with a configuration and fields."""
    directory = tmp_path_factory.mktemp("models")
    known, made = CONFIGS | TYPES | DENSE | LATENTS | MIXTURES, dict[str, Tiny]()

    def make(name: str, kind: str = "", fields: dict | None = None) -> Tiny:
        if name not in made:
            made[name] = Tiny(name, *((kind, fields or {}) if kind else known[name]), directory)
        return made[name]

    return make


@pytest.fixture
def altered(tiny, tmp_path) -> Callable[..., Path]:
    """Copies a tiny model, with other fields in config.json, and with its tensors as a function leaves them."""

    def copy(name: str, change: Callable[[dict[str, torch.Tensor]], object] | None = None, **fields) -> Path:
        directory = Path(shutil.copytree(tiny(name).directory, tmp_path / "copied", dirs_exist_ok=True))
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | fields))
        if change is not None:
            tensors = load_file(directory / "model.safetensors")
            change(tensors)
            save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return directory

    return copy


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., ModelRunner]:
    """A runner for a model, small, with a cache of its own."""

    def load_small(model: Path | str, **options) -> ModelRunner:
        defaults = {"kv_cache_bytes": 1 << 22, "swap_bytes": 1 << 20, "block_size": 8, "cache_dir": tmp_path / "cache"}
        return load_runner(str(model), **{**defaults, **options})

    return load_small


@pytest.fixture(scope="session")
def greedy() -> Callable[[ModelRunner, list[list[int]], int], list[list[int]]]:
    """Greedy continuations of several prompts in one batch, with neither scheduler nor sharing."""

    def run(runner: ModelRunner, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        free, size = iter(range(runner.info.num_blocks)), runner.info.block_size
        pieces = [
            Piece(list(prompt), len(prompt), [next(free) for _ in range((len(prompt) + num_tokens) // size + 1)])
            for prompt in prompts
        ]
        for _ in range(num_tokens):
            output = runner.run(step_of(pieces, size))
            for piece, token in zip(pieces, output.token_ids, strict=True):
                piece.tokens.append(token)
                piece.length = 1
        return [piece.tokens[len(prompt) :] for piece, prompt in zip(pieces, prompts, strict=True)]

    return run


@pytest.fixture(scope="session")
def all_logits() -> Callable[..., torch.Tensor]:
    """The logits of all positions of a sequence, in one step, or one for each piece up to `ends`."""

    def run(runner: ModelRunner, tokens: list[int], ends: Sequence[int] = ()) -> torch.Tensor:
        size, decoder, parts = runner.info.block_size, runner._decoder, []
        table = list(range(-(-len(tokens) // size)))[::-1]
        for start, end in pairwise((0, *ends, len(tokens))):
            _, batch = batch_of_spans([tokens], [(0, start, end)], [table], size)
            with torch.inference_mode():
                hidden = decoder.forward(batch, runner._arena.layers, torch.arange(end - start))
                parts.append(decoder.logits(hidden).float().clone())
        return torch.cat(parts)

    return run
