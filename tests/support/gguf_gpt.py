"""What llama.cpp's converter makes of models like GPT: their settings, and what it does to tensors."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Config = dict[str, Any]
ARCHITECTURES = {"bloom": "bloom", "falcon": "falcon", "gpt2": "gpt2", "mpt": "mpt"}  # by model_type
OWN_SETTINGS = frozenset(ARCHITECTURES.values())
NO_ENDS = dict.fromkeys(("eos_token_id", "bos_token_id"))
GPT2 = {"vocab_size": 128, "n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, **NO_ENDS}
BLOOM = {"vocab_size": 128, "hidden_size": 48, "n_layer": 3, "n_head": 6, "seq_length": 128, **NO_ENDS}
FALCON = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, **NO_ENDS}
MPT = {"vocab_size": 128, "max_seq_len": 128, "d_model": 48, "n_layers": 3, "n_heads": 6, **NO_ENDS}
MODELS = {  # by a name: the class of the configuration, and its fields
    "gpt2": ("GPT2", GPT2),
    "gpt2-wide": ("GPT2", {**GPT2, "n_embd": 256, "n_layer": 2}),
    "bloom": ("Bloom", BLOOM),
    "bloom-untied": ("Bloom", {**BLOOM, "tie_word_embeddings": False}),
    "falcon": ("Falcon", FALCON),
    "falcon-grouped": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-untied": ("Falcon", {**FALCON, "tie_word_embeddings": False}),
    "mpt": ("Mpt", MPT),
    "mpt-clipped": ("Mpt", {**MPT, "d_model": 64, "n_heads": 8, "attn_config": {"clip_qkv": 0.5}}),
}


def find(config: Config, *names: str) -> Any:
    return next(config[name] for name in names if name in config)


def settings_of(config: Config, arch: str) -> Config:
    hidden = find(config, "hidden_size", "n_embd", "d_model")
    found = {
        "block_count": find(config, "num_hidden_layers", "n_layer", "n_layers"),
        "context_length": 2048 if arch == "falcon" else find(config, "n_positions", "seq_length", "max_seq_len"),
        "embedding_length": hidden,
        "feed_forward_length": 4 * hidden,
        "attention.head_count": _heads(config),
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }
    if arch in ("bloom", "falcon"):
        found["attention.head_count_kv"] = _kv_heads(config)
    if arch == "falcon":
        found["tensor_data_layout"] = "jploski"
    if arch == "mpt":
        attention = config["attn_config"]
        found["attention.clamp_kqv"] = attention["clip_qkv"]
        found["attention.max_alibi_bias"] = float(attention["alibi_bias_max"] if attention["alibi"] else 0)
    return found


def _heads(config: Config) -> int:
    heads: int = find(config, "num_attention_heads", "n_head", "n_heads")
    return heads


def _kv_heads(config: Config) -> int:
    if config["model_type"] == "falcon":
        return int(config["num_kv_heads"]) if config["new_decoder_architecture"] else 1
    return _heads(config)


def modified(tensors: dict[str, Tensor], config: Config, arch: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors as the class of the architecture hands them to the table of names."""
    for full, tensor in tensors.items():
        name = full.removeprefix("transformer.") if arch == "bloom" else full
        if arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            yield name, tensor.T
        elif "query_key_value" in name:
            heads, keys = _heads(config), _kv_heads(config)
            by_key = tensor.unflatten(0, (keys, heads // keys + 2, -1))
            parts = (by_key[:, :-2], by_key[:, -2:-1], by_key[:, -1:])
            yield name, torch.cat([part.flatten(0, 2) for part in parts])
        else:
            yield name, tensor
