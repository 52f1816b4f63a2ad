"""Reads a GGUF file as a Transformers checkpoint: metadata as config.json, dequantized tensors by their usual names."""

import re
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.dequantize import dequantize
from octavo.errors import BadModel
from octavo.gguf import GgufFile, TensorInfo, TensorType
from octavo.gguf_metadata import Metadata

# Architectures whose query and key rows llama.cpp interleaves (its rotary embedding pairs neighbours, ours pairs
# halves).
INTERLEAVED = ("llama", "smollm3")
ARCHITECTURES = (*INTERLEAVED, "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufSource:
    """A WeightSource over an open GGUF file of one of ARCHITECTURES. Tensors it does not know keep their names."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._arch = architecture(file)
        self._stored = {usual_name(name): name for name in file.tensors if name != ROPE_FACTORS}

    def names(self) -> set[str]:
        return set(self._stored)

    def get(self, name: str) -> Tensor:
        return self._ordered(name, read_tensor(self._file, self._info(name).name))

    def kind(self, name: str) -> TensorType:
        """The type that a tensor is stored in."""
        return self._info(name).type

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._info(name).shape)

    def blocks(self, name: str) -> Tensor:
        """The stored bytes of a tensor of two dimensions: uint8 [rows, bytes of a row], in new memory."""
        info = self._info(name)
        data = torch.frombuffer(bytearray(self._file.tensor_bytes(info.name)), dtype=torch.uint8)
        return self._ordered(name, data.view(info.shape[0], -1))

    def _info(self, name: str) -> TensorInfo:
        if name not in self._stored:
            raise BadModel(f"{self._file.path.name} has no tensor {name!r}")
        return self._file.tensors[self._stored[name]]

    def _ordered(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor with its rows in the order that our decoders use."""
        heads = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}
        for part, key in heads.items():
            if self._arch in INTERLEAVED and f".{part}." in name:
                return _halves(tensor, self._file.metadata.integer(f"{self._arch}.{key}"))
        return tensor


def read_tensor(file: GgufFile, name: str) -> Tensor:
    """A tensor in float32, in new memory."""
    info = file.tensors[name]
    num_values = torch.Size(info.shape).numel()
    return torch.from_numpy(dequantize(file.tensor_bytes(name), info.type, num_values)).view(info.shape)


def usual_name(name: str) -> str:
    """The name of a GGUF tensor in a Transformers checkpoint."""
    match = _BLOCK.fullmatch(name)
    if match and match[2] in _INNER:
        return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"
    return _OUTER.get(name, name)


def architecture(file: GgufFile) -> str:
    """The file's architecture, one of ARCHITECTURES."""
    name = file.metadata.string("general.architecture")
    if name not in ARCHITECTURES:
        raise BadModel(
            f"{file.path.name}: GGUF files of architecture {name!r} are not read ({', '.join(ARCHITECTURES)} are)"
        )
    if file.metadata.integer("split.count", 1) > 1:
        raise BadModel(f"{file.path.name} is one of several parts of a model; join them with llama-gguf-split --merge")
    return name


def read_config(file: GgufFile) -> dict[str, Any]:
    """The content that config.json would have."""
    arch, data = architecture(file), file.metadata
    if "token_embd.weight" not in file.tensors:
        raise BadModel(f"{file.path.name} has no token_embd.weight")
    num_heads = data.integer(f"{arch}.attention.head_count")
    hidden = data.integer(f"{arch}.embedding_length")
    num_layers = data.integer(f"{arch}.block_count")
    if num_heads < 1 or not 1 <= num_layers <= len(file.tensors):
        raise BadModel(f"{file.path.name}: {num_heads} heads, {num_layers} layers in {len(file.tensors)} tensors")
    head_dim = data.integer(f"{arch}.attention.key_length", hidden // num_heads)
    return {
        "model_type": arch,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": data.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": data.integer(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": data.integer(f"{arch}.context_length"),
        "rms_norm_eps": data.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, arch, head_dim),
        "no_rope_layers": [(layer + 1) % 4 for layer in range(num_layers)] if arch == "smollm3" else None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": end_tokens(data),
    }


def end_tokens(data: Metadata) -> list[int]:
    """The tokens that end an answer: the ends of a sequence, a turn and a message."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return sorted({data.integer(key) for key in keys if key in data})


def _rope(file: GgufFile, arch: str, head_dim: int) -> dict[str, Any]:
    data, prefix = file.metadata, f"{arch}.rope."
    rope: dict[str, Any] = {
        "rope_theta": data.number(f"{prefix}freq_base", 10000.0),
        "partial_rotary_factor": data.integer(f"{prefix}dimension_count", head_dim) / head_dim,
    }
    if ROPE_FACTORS in file.tensors:
        factors = read_tensor(file, ROPE_FACTORS).flatten().tolist()
        return rope | {"rope_type": "factors", "factors": tuple(factors)}
    kind = data.string(f"{prefix}scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise BadModel(f"{file.path.name}: {prefix}scaling.type {kind!r} is not supported (none, linear and yarn are)")
    context = data.integer(f"{arch}.context_length")
    return rope | {
        "rope_type": kind,
        "factor": data.number(f"{prefix}scaling.factor", 1.0),
        "original_max_position_embeddings": data.integer(f"{prefix}scaling.original_context_length", context),
    }


def _halves(tensor: Tensor, num_heads: int) -> Tensor:
    """Undoes the interleaving: row 2i of a head becomes row i, row 2i + 1 row i + half."""
    if num_heads < 1 or tensor.shape[0] % (2 * num_heads):
        raise BadModel(f"{tensor.shape[0]} rows are not {num_heads} heads of pairs")
    paired = tensor.view(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return paired.transpose(1, 2).reshape(tensor.shape)
