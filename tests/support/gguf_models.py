"""Writes GGUF files of tiny Transformers checkpoints, as llama.cpp's converter would, in any type of tensors."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.model_files.gguf import TensorType

Kinds = str | Callable[[str], str]  # the type of every matrix, or of the matrix of a name
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
}
GEMMA2 = INNER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
INTERLEAVED = ("llama", "smollm3")

MIXED = {  # as K mixtures do, and further: no two matrices that lie side by side are of one type
    "q_proj": "Q4_K",
    "k_proj": "Q6_K",
    "v_proj": "Q5_0",
    "o_proj": "Q3_K",
    "qkv_proj": "Q4_K",
    "gate_proj": "Q5_1",
    "up_proj": "Q8_0",
    "gate_up_proj": "IQ4_XS",
    "down_proj": "Q2_K",
    "embed_tokens": "Q5_K",
    "lm_head": "BF16",
}


def by_part(usual: str, **others: str) -> Callable[[str], str]:
    """The types of a file: of a matrix by its part in a layer."""
    return lambda tensor: others.get(tensor.split(".")[-2], usual)


def q4_k_m(tensor: str) -> str:
    """Half of the layers have values and the way down in more bits."""
    *before, part, _ = tensor.split(".")
    odd = part in ("v_proj", "down_proj") and int(before[2]) % 2
    return "Q6_K" if odd or part in ("embed_tokens", "lm_head") else "Q4_K"


OUTER_K = {"embed_tokens": "Q6_K", "lm_head": "Q6_K", "v_proj": "Q5_K"}
MIXTURES: tuple[tuple[Kinds, str], ...] = (  # types of a file, most of them llama.cpp's, and what of them stays
    (by_part("Q3_K", **OUTER_K, down_proj="Q4_K"), "q3_k+q4_k+q5_k+q6_k"),
    (q4_k_m, "q4_k+q6_k"),
    (by_part("IQ4_XS", **OUTER_K, o_proj="IQ4_NL"), "iq4_nl+iq4_xs+q5_k+q6_k"),
    (by_part("Q5_0", embed_tokens="Q8_0", lm_head="Q8_0", v_proj="Q5_1"), "q5+q5_mins+q8"),
    (by_part("Q4_K", **MIXED), ""),
)


def write_gguf(
    directory: Path,
    path: Path,
    kinds: Kinds = "F32",
    extra: dict[str, NDArray[Any]] | None = None,
    describe_tokens: Callable[[gguf.GGUFWriter], None] | None = None,
    in_part: int = 0,
) -> dict[str, Tensor]:
    """Writes `path`, or files of `in_part` tensors; returns what the tensors mean, as the checkpoint has them.

    Tokens 2 and 5 end an answer, unless `describe_tokens` writes something else of the tokenizer.
    A matrix of a type that the gguf package cannot make gets random blocks of that type.
    """
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, config["model_type"], split_max_tensors=in_part)
    add_sizes(writer, config)
    (describe_tokens or _add_ends)(writer)
    values = load_file(directory / "model.safetensors")
    for name, weight in values.items():
        kind = (kinds if isinstance(kinds, str) else kinds(name)) if weight.ndim == 2 else "F32"
        raw, values[name] = encoded(weight.float().numpy(), kind)
        _add_tensor(writer, config, name, raw, kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    finish(writer)
    return values


def write_values(directory: Path, target: Path, values: dict[str, Tensor]) -> Path:
    """The checkpoint of `directory` with other values."""
    target.mkdir()
    save_file(values, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((directory / "config.json").read_text())
    return target


def write_bare(
    path: Path,
    arch: str,
    layers: int,
    shapes: dict[str, tuple[int, ...]],
    kind: str = "F32",
    **settings: int | list[int],
) -> Path:
    """A file that says little: four heads of 32, of 64 numbers. Its tensors have these shapes and type, and are 0."""
    writer = gguf.GGUFWriter(path, arch)
    sizes = {"block_count": layers, "context_length": 8192, "embedding_length": 64, "feed_forward_length": 64}
    heads = {"attention.head_count": 4, "attention.key_length": 32, "attention.value_length": 32}
    for key, value in (sizes | heads | settings).items():
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"{arch}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, shape in shapes.items():
        own = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", quantize(np.zeros(shape, np.float32), own), raw_dtype=own)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@cache
def block_pool(kind: str) -> NDArray[np.uint8]:
    """Random blocks of a type, [64, bytes], without numbers that are no weights: their largest is about a tenth."""
    size, num_bytes = TensorType[kind].block, TensorType[kind].num_bytes
    rng, found = np.random.default_rng(7), np.empty((0, num_bytes), dtype=np.uint8)
    while len(found) < 64:
        blocks = rng.integers(0, 256, ((1 << 18) // size, num_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            largest = np.abs(dequantize(blocks, gguf.GGMLQuantizationType[kind])).max(axis=1)
        found = np.concatenate((found, blocks[(largest > 0.05) & (largest < 0.3)]))
    return found[:64]


def random_rows(kind: str, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """A matrix of blocks of the pool, as it is stored: [rows, bytes of a row]."""
    pool, size = block_pool(kind), TensorType[kind].block
    picked = np.random.default_rng(seed).integers(0, len(pool), (rows, columns // size))
    return pool[picked].reshape(rows, -1)


def encoded(array: NDArray[np.float32], kind: str) -> tuple[NDArray[Any], Tensor]:
    """The stored rows of a tensor, and the values that they mean."""
    if kind == "F32":
        return array, torch.from_numpy(array)
    raw = gguf.GGMLQuantizationType[kind]
    try:
        stored = quantize(array, raw)
    except NotImplementedError:
        seed = array.size + int(abs(array).sum())
        rows = random_rows(kind, array.size // array.shape[-1], array.shape[-1], seed)
        stored = rows.reshape(*array.shape[:-1], -1)
    return stored, torch.from_numpy(dequantize(stored, raw).reshape(array.shape).astype(np.float32))


def _add_tensor(writer: gguf.GGUFWriter, config: dict[str, Any], name: str, raw: NDArray[Any], kind: str) -> None:
    arch = config["model_type"]
    stem, _, ending = name.rpartition(".")
    stored, part = OUTER.get(stem, ""), stem
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        stored = f"blk.{layer}.{(GEMMA2 if arch == 'gemma2' else INNER)[part]}"
    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(part)
    if heads and arch in INTERLEAVED:
        raw = interleaved(raw, config[heads])
    if arch == "gemma2" and "norm" in part:
        raw = raw + 1
    writer.add_tensor(f"{stored}.{ending}", np.ascontiguousarray(raw), raw_dtype=gguf.GGMLQuantizationType[kind])


def interleaved(rows: Any, num_heads: int) -> Any:
    """What llama.cpp's converter does to query and key rows: row i and row i + half of a head become neighbours."""
    size = rows.shape[0] // num_heads
    order = [h * size + part * (size // 2) + i for h in range(num_heads) for i in range(size // 2) for part in (0, 1)]
    return rows[order]


def _add_ends(writer: gguf.GGUFWriter) -> None:
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "phi3":
        size = config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
        writer.add_sliding_window(config["sliding_window"] or 0)
        if rope["rope_type"] == "longrope":
            original = config["original_max_position_embeddings"]
            scale = config["max_position_embeddings"] / original
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
            for part in ("long", "short"):
                factors = np.array(rope[f"{part}_factor"], dtype=np.float32)
                writer.add_tensor(f"rope_factors_{part}.weight", factors)
