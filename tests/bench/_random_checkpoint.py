"""Checkpoints with random weights in the shapes of published models: a folder as Transformers writes it.

The tokenizer is the demo model's, with as many tokens that no text becomes as the shape's vocabulary has more.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpu_worker.models.checkpoint.locate import demo_file
from octavo.text.tokenizers.gguf_vocabulary import read_gguf

COMMON = {"hidden_act": "silu", "tie_word_embeddings": True, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
QWEN2 = COMMON | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936}
QWEN2 |= {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "num_key_value_heads": 2}
LLAMA = COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "head_dim": 64}
LLAMA |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_key_value_heads": 8}
GEMMA = COMMON | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144}
GEMMA |= {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
GEMMA |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 512, "sliding_window_pattern": 6}
GEMMA |= {"head_dim": 256, "query_pre_attn_scalar": 256, "num_key_value_heads": 1}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": QWEN2 | dict(zip(SIZES, (896, 4864, 24, 14), strict=True)),
    "qwen2.5-1.5b": QWEN2 | dict(zip(SIZES, (1536, 8960, 28, 12), strict=True)),
    "llama-3.2-1b": LLAMA | dict(zip(SIZES, (2048, 8192, 16, 32), strict=True)),
    "gemma-3-1b": GEMMA | dict(zip(SIZES, (1152, 6912, 26, 4), strict=True)),
}


def write_checkpoint(shape: str, directory: Path) -> Path:
    """The folder of this shape below `directory`, with weights in bfloat16. One that is there stays."""
    folder = directory / shape
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, config["vocab_size"], {})
    generator = torch.Generator().manual_seed(1)
    tensors = {name: _random(size, generator) for name, size in sizes_of(config).items()}
    save_file(tensors, folder / "new.safetensors", metadata={"format": "pt"})
    (folder / "new.safetensors").rename(folder / "model.safetensors")
    return folder


def _random(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def sizes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors, by their names in a checkpoint."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    sizes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows in {"q": queries, "k": keys, "v": keys}.items():
            sizes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                sizes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        sizes[f"{prefix}self_attn.o_proj.weight"] = (hidden, queries)
        sizes[f"{prefix}mlp.gate_proj.weight"] = sizes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        sizes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        sizes[f"{prefix}input_layernorm.weight"] = sizes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        if config["model_type"] == "gemma3_text":
            sizes |= {f"{prefix}{part}_feedforward_layernorm.weight": (hidden,) for part in ("pre", "post")}
            sizes |= {f"{prefix}self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
    return sizes


def write_tokenizer(folder: Path, size: int, special: Mapping[str, int]) -> None:
    """The demo model's, with so many tokens; these have the ids that they have here."""
    content = json.loads(read_gguf(demo_file()).backend.to_str())
    names = {i: name for name, i in content["model"]["vocab"].items() if name not in special}
    names |= {i: name for name, i in special.items()}
    content["model"]["vocab"] = known = {names.get(i, f"<more-{i}>"): i for i in range(size)}
    content["model"]["merges"] = [each for each in content["model"]["merges"] if {*each, "".join(each)} <= known.keys()]
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"] not in special]
    content["added_tokens"] += [content["added_tokens"][-1] | {"id": i, "content": name} for name, i in special.items()]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    told = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<repo_name>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(told | {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|im_end|>"})
    )
