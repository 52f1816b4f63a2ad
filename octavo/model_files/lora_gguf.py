"""A low-rank adapter in a GGUF file, as llama.cpp's convert_lora_to_gguf.py writes it.

Its tensors have llama.cpp's names of the model's modules, and a rank each. For models whose rows of queries and keys
llama.cpp interleaves, those of lora_b are interleaved, too: whoever knows the model's heads puts them in order.
"""

import math
import re
from pathlib import Path
from typing import NamedTuple

from octavo.model_files.gguf import GgufFile, TensorInfo
from octavo.model_files.gguf_support import PAIRED_ADAPTERS
from octavo.model_files.lora_config import MAX_RANK
from octavo.model_files.lora_tensors import LoraMatrix, StoredTensor, stored_tensor
from octavo.request.errors import BadModel

STORED = {  # llama.cpp's names of modules
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_qkv": "qkv_proj",
    "attn_output": "o_proj",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
STORED_OF = {"phi3": STORED | {"ffn_up": "gate_up_proj"}}  # by architecture
_TENSOR = re.compile(r"blk\.(\d{1,4})\.(\w+)\.weight\.lora_([ab])")
_KNOWN = ("adapter.type", "adapter.lora.alpha", "adapter.lora.task_name")


class GgufLora(NamedTuple):
    """`scale` is that of modules of the largest rank; `scales` are those of others, by layer and module."""

    rank: int
    alpha: float
    scale: float
    tensors: dict[LoraMatrix, StoredTensor]
    content: bytes
    scales: dict[tuple[int, str], float]
    interleaved: bool


def read(path: Path) -> GgufLora:
    """Raises BadModel and MalformedGguf."""
    file = GgufFile(path)
    try:
        return _read(file)
    finally:
        file.close()


def _read(file: GgufFile) -> GgufLora:
    arch, alpha = _read_metadata(file)
    names, parts, start = STORED_OF.get(arch, STORED), [], 0
    tensors: dict[LoraMatrix, StoredTensor] = {}
    for info in file.tensors.values():
        matrix = _matrix(info, names)
        if matrix in tensors:
            raise BadModel(f"tensor {info.name[:120]} is there twice: once by another spelling of its name")
        tensors[matrix] = stored_tensor(info.name, info.type.name, info.shape, start)
        parts.append(bytes(file.tensor_bytes(info.name)))
        start += len(parts[-1])
    ranks = {(layer, module): each.shape[0] for (layer, module, side), each in tensors.items() if side == "A"}
    if not ranks:
        raise BadModel("has no tensor lora_a")
    rank = max(ranks.values())
    if rank > MAX_RANK:
        raise BadModel(f"has the rank {rank}: at most {MAX_RANK} is computed")
    scales = {place: _scale(alpha, of) for place, of in ranks.items() if alpha and of != rank}
    return GgufLora(rank, alpha, _scale(alpha, rank), tensors, b"".join(parts), scales, arch in PAIRED_ADAPTERS)


def _scale(alpha: float, rank: int) -> float:
    return alpha / rank if alpha else 1.0  # as llama.cpp has it


def _read_metadata(file: GgufFile) -> tuple[str, float]:
    """Architecture and alpha."""
    data = file.metadata
    if (kind := data.string("general.type", "model")) != "adapter":
        raise BadModel(f"its general.type is {kind[:40]!r}: it is no adapter")
    if (kind := data.string("adapter.type", "")) != "lora":
        raise BadModel(f"its adapter.type is {kind[:40]!r}, and not lora")
    if more := [key for key in data if key.startswith("adapter.") and key not in _KNOWN]:
        raise BadModel(f"{more[0][:80]} is not computed here: convert it without")
    if file.num_parts > 1:
        raise BadModel("has several parts: an adapter is one file")
    alpha = data.number("adapter.lora.alpha", 0.0)
    if not math.isfinite(alpha):
        raise BadModel(f"its adapter.lora.alpha {alpha} is no number")
    return data.string("general.architecture", ""), alpha


def _matrix(info: TensorInfo, names: dict[str, str]) -> LoraMatrix:
    match = _TENSOR.fullmatch(info.name)
    if match is None or match[2] not in names:
        raise BadModel(f"tensor {info.name[:120]} is not computed here: only lora_a and lora_b of {', '.join(names)}")
    return LoraMatrix(int(match[1]), names[match[2]], match[3].upper())
