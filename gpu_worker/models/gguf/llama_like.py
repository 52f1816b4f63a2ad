"""Files whose tensors are named as those of Llama: what config.json of such a model says, and its tensors."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.gguf.header import GgufSettings, architecture
from gpu_worker.models.gguf.held_blocks import held_blocks
from gpu_worker.models.gguf.positions import scaling
from gpu_worker.models.gguf.recipes import LLAMA, halves
from gpu_worker.models.gguf.settings import IGNORED_OF_PICTURES
from gpu_worker.models.gguf.tensors import ROPE_FACTORS, ROPE_LONG, ROPE_SHORT, block_format, dequantize, read_tensor
from octavo.model_files.gguf import GgufFile, TensorInfo
from octavo.model_files.gguf_support import INTERLEAVED
from octavo.request.errors import BadModel

TEXTS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3"}  # whose text alone is read, and what it is without pictures

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = LLAMA | {"attn_qkv": "self_attn.qkv_proj"}
_INNER_OF = {
    "phi3": _INNER | {"ffn_up": "mlp.gate_up_proj"},
    "seed_oss": _INNER | {"post_attention_norm": "post_attention_layernorm"},
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class LlamaLikeSource:
    """A WeightSource over an open GGUF file that octavo serves. Tensors it does not know keep their names."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._arch = architecture(file)
        known = set(file.tensors) - {ROPE_FACTORS, ROPE_LONG, ROPE_SHORT}
        self._stored = {usual_name(name, self._arch): name for name in known}
        self._rows: dict[str, range] = {}  # which of the stored tensor's, where they are not all
        if self._arch != "phi3":
            self._divide_fused([name for name in self._stored if ".qkv_proj." in name])

    def names(self) -> set[str]:
        return set(self._stored)

    def get(self, name: str) -> Tensor:
        info = self._info(name)
        values = dequantize(self._bytes(name), info.type, torch.Size(self.shape(name)).numel())
        self._file.release(info.name)
        return self._ordered(name, torch.from_numpy(values).view(self.shape(name)))

    def block_format(self, name: str) -> str:
        return block_format(self._info(name).type)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = tuple(self._info(name).shape)
        return (len(self._rows[name]), *shape[1:]) if name in self._rows else shape

    def blocks(self, name: str) -> Tensor:
        """The blocks of a tensor of two dimensions, for a kernel: uint8 [rows, bytes of a row], in new memory."""
        info = self._info(name)
        blocks = held_blocks(self._bytes(name), info.type)
        self._file.release(info.name)
        return self._ordered(name, blocks.view(self.shape(name)[0], -1))

    def _divide_fused(self, names: Sequence[str]) -> None:
        """Takes apart what the converter fuses with --fuse-qkv: only of queries and keys rows are interleaved."""
        config = read_config(self._file) if names else {}
        for fused in names:
            stored, size = self._stored.pop(fused), config["head_dim"]
            queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
            if (rows := self._file.tensors[stored].shape[0]) != queries + 2 * keys:
                raise BadModel(f"tensor {stored!r} has {rows} rows, the header says {queries} + {keys} + {keys}")
            ends = {"q_proj": (0, queries), "k_proj": (queries, queries + keys), "v_proj": (queries + keys, rows)}
            for part, place in ends.items():
                name = fused.replace("qkv_proj", part)
                self._stored[name], self._rows[name] = stored, range(*place)

    def _bytes(self, name: str) -> memoryview:
        info = self._info(name)
        data = self._file.tensor_bytes(info.name)
        if (own := self._rows.get(name)) is None:
            return data
        return data[own.start * len(data) // info.shape[0] : own.stop * len(data) // info.shape[0]]

    def _info(self, name: str) -> TensorInfo:
        if name not in self._stored:
            raise BadModel(f"{self._file.path.name} has no tensor {name!r}")
        return self._file.tensors[self._stored[name]]

    def _ordered(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor with its rows in the order that our decoders use."""
        heads = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}
        for part, key in heads.items():
            if self._arch in INTERLEAVED and f".{part}." in name:
                return halves(self._file.metadata.integer(f"{self._arch}.{key}"))([tensor])
        return tensor


def usual_name(name: str, arch: str) -> str:
    """The name of a GGUF tensor in a Transformers checkpoint of that architecture."""
    match = _BLOCK.fullmatch(name)
    inner = _INNER_OF.get(arch, _INNER)
    if match and match[2] in inner:
        return f"model.layers.{match[1]}.{inner[match[2]]}.{match[3]}"
    return _OUTER.get(name, name)


def read_config(file: GgufFile) -> dict[str, Any]:
    """BadModel if the file has a setting of its architecture that is not understood, or lacks one."""
    arch = architecture(file)
    header = GgufSettings(file, arch)
    if "token_embd.weight" not in file.tensors:
        raise BadModel(f"{file.path.name} has no token_embd.weight")
    num_heads, num_layers = header.integer("attention.head_count"), header.integer("block_count")
    hidden = header.integer("embedding_length")
    if num_heads < 1 or not 1 <= num_layers <= len(file.tensors):
        raise BadModel(f"{file.path.name}: {num_heads} heads, {num_layers} layers in {len(file.tensors)} tensors")
    head_dim = header.integer("attention.key_length", hidden // num_heads)
    header.refuse_others(head_dim)
    for key in ("expert_count", "expert_used_count"):  # some converters write zeros
        header.integer(key, 0)
    for key in IGNORED_OF_PICTURES if arch in TEXTS else ():
        header.get(key)
    config = {
        "model_type": TEXTS.get(arch, arch),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": header.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": header.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": _context(header),
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(header, head_dim),
        "no_rope_layers": [(layer + 1) % 4 for layer in range(num_layers)] if arch == "smollm3" else None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **({"sliding_window": header.integer("attention.sliding_window", 0)} if arch == "phi3" else {}),
    }
    header.refuse_unknown()
    return config


def _context(header: GgufSettings) -> int:
    """Of Ministral 3, as many tokens as it was first trained with: from there on it also scales its queries."""
    context = header.integer("context_length")
    if header.number("attention.temperature_scale", 0.0):
        return min(context, header.integer("rope.scaling.original_context_length"))
    return context


def _rope(header: GgufSettings, head_dim: int) -> dict[str, Any]:
    file, context = header.file, header.integer("context_length")
    rope: dict[str, Any] = {
        "rope_theta": header.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": header.integer("rope.dimension_count", head_dim) / head_dim,
    }
    if (ROPE_LONG in file.tensors) != (ROPE_SHORT in file.tensors):
        raise BadModel(f"{file.path.name} has only one of {ROPE_LONG} and {ROPE_SHORT}")
    if ROPE_LONG in file.tensors:
        header.get("rope.scaling.type")
        return rope | {
            "rope_type": "longrope",
            "original_max_position_embeddings": header.integer("rope.scaling.original_context_length", context),
            "attention_factor": header.number("rope.scaling.attn_factor", 0.0) or None,
            "long_factor": read_tensor(file, ROPE_LONG).flatten().tolist(),
            "short_factor": read_tensor(file, ROPE_SHORT).flatten().tolist(),
        }
    scaled = scaling(header, context)
    if ROPE_FACTORS not in file.tensors:
        return rope | scaled
    if scaled:
        raise BadModel(f"{file.path.name} scales positions by {ROPE_FACTORS} and by {header.arch}.rope.scaling")
    return rope | {"rope_type": "factors", "factors": tuple(read_tensor(file, ROPE_FACTORS).flatten().tolist())}
