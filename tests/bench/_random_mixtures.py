"""GGUF files of mixtures of experts with random blocks, a billion weights each: like Qwen3-30B-A3B, like gpt-oss-20B.

The vocabulary is the demo model's, so that the last product keeps about its share of a step.
"""

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from _random_gguf import copy_tokenizer
from gguf_converter import add_settings, settings_of
from gguf_models import finish, random_rows

ROPE = {"rope_type": "default", "rope_theta": 1e6}
COMMON = {"vocab_size": 49152, "hidden_size": 1024, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
COMMON |= {"num_attention_heads": 16, "num_key_value_heads": 4, "num_experts_per_tok": 4, "num_local_experts": 32}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-moe-1b": COMMON
    | {"arch": "qwen3moe", "num_hidden_layers": 16, "head_dim": 128, "moe_intermediate_size": 512}
    | {"intermediate_size": 2048, "rope_parameters": ROPE},
    "gpt-oss-1b": COMMON
    | {"arch": "gpt-oss", "num_hidden_layers": 12, "head_dim": 64, "intermediate_size": 1024, "sliding_window": 128}
    | {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 4096}},
}


def write_mixture(shape: str, directory: Path) -> Path:
    """The file of this shape below `directory`: Q4_K_M, or MXFP4 with Q8_0. One that is there stays."""
    path = directory / f"{shape}.gguf"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    config = MIXTURES[shape]
    writer = gguf.GGUFWriter(path.with_suffix(".new"), config["arch"])
    add_settings(writer, settings_of(config, config["arch"]), config["arch"])
    copy_tokenizer(writer, config["vocab_size"])
    for number, (name, size) in enumerate(_sizes_of(config).items()):
        kind = _kind(name, size, config)
        if kind == "F32":
            value = np.random.default_rng(number).normal(0, 0.02, size) if "gate_inp" in name else np.ones(size)
            writer.add_tensor(name, (np.zeros(size) if name.endswith("bias") else value).astype(np.float32))
            continue
        rows = random_rows(kind, int(np.prod(size[:-1])), size[-1], seed=number)
        writer.add_tensor(name, rows.reshape(*size[:-1], -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)
    path.with_suffix(".new").rename(path)
    return path


def _sizes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, is_gpt_oss = config["hidden_size"], config["head_dim"], config["arch"] == "gpt-oss"
    queries, keys = config["num_attention_heads"] * heads, config["num_key_value_heads"] * heads
    experts, inner = config["num_local_experts"], config.get("moe_intermediate_size", config["intermediate_size"])
    sizes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config["vocab_size"], hidden)}
    sizes |= {"output.weight": (config["vocab_size"], hidden), "output_norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {"attn_q": (queries, hidden), "attn_k": (keys, hidden)}
        own |= {"attn_v": (keys, hidden), "attn_output": (hidden, queries), "ffn_gate_inp": (experts, hidden)}
        own |= {f"ffn_{part}_exps": (experts, inner, hidden) for part in ("gate", "up")}
        own |= {"ffn_down_exps": (experts, hidden, inner)}
        biases = {f"{name}.bias": size[:-1] for name, size in own.items()} if is_gpt_oss else {}
        own |= {"attn_norm": (hidden,), "post_attention_norm" if is_gpt_oss else "ffn_norm": (hidden,)}
        own |= {"attn_sinks": (config["num_attention_heads"],)} if is_gpt_oss else {}
        own |= {} if is_gpt_oss else {"attn_q_norm": (heads,), "attn_k_norm": (heads,)}
        sizes |= {f"blk.{layer}.{name}": size for name, size in biases.items()}
        sizes |= {f"blk.{layer}.{name}.weight": size for name, size in own.items()}
    return sizes


def _kind(name: str, size: tuple[int, ...], config: dict[str, Any]) -> str:
    if len(size) == 1 or "gate_inp" in name or name.endswith("bias"):
        return "F32"
    if config["arch"] == "gpt-oss":
        return "MXFP4" if "_exps" in name else "Q8_0"
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    more = name.startswith("output") or (layer % 2 == 0 and ("attn_v" in name or "ffn_down" in name))
    return "Q6_K" if more else "Q4_K"
