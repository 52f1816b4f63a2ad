"""A low-rank adapter as PEFT writes it: adapter_config.json beside adapter_model.safetensors.

`read_lora` says what the adapter is and where its numbers lie, and names it by a digest of all that counts for a
token: every number with its type, shape and place, and rank, alpha and rule of scaling. What octavo does not compute is
refused by its name: nothing of an adapter is left out in silence. Needs neither torch nor safetensors.
"""

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from octavo.model_files.json_file import read_json
from octavo.request.errors import BadModel, NotFound, TooLarge

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 256
MAX_HEADER = 64 << 20
MAX_BYTES = 2 << 30  # of a file's numbers, where nobody says less
SIZES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of a number, by safetensors' names
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
_TENSOR = re.compile(r"base_model\.model\.(?:model\.)?layers\.(\d{1,4})\.(self_attn|mlp)\.(\w+)\.lora_([AB])\.weight")
# Settings of training and of bookkeeping: they change nothing of what an adapter computes.
_NOTES = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "peft_version"),
        *("revision", "runtime_config", "target_modules", "exclude_modules", "task_type", "layers_pattern"),
        *("layers_to_transform", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    }
)
_COMPUTED = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights", "bias"})
_UNSET: tuple[object, ...] = (None, False, "", [], {})
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)  # what odd files lead to
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # other starts change the weights of the model


class LoraMatrix(NamedTuple):
    """Where one matrix lies."""

    layer: int
    module: str  # one of MODULES
    side: str  # "A": [rank, inputs], "B": [outputs, rank]


class StoredTensor(NamedTuple):
    """Its type by safetensors' name, its shape, and where its bytes begin in the file."""

    dtype: str
    shape: tuple[int, int]
    start: int

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class LoraFiles:
    """What a folder has."""

    path: Path
    digest: str  # 32 hex digits
    rank: int
    scale: float  # what b · a · x is multiplied with
    tensors: Mapping[LoraMatrix, StoredTensor]
    content: bytes = field(repr=False)  # of the file of weights, as it was when the digest was computed

    @property
    def num_bytes(self) -> int:
        """Of its numbers."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def read_lora(path: Path, digest: str = "", max_bytes: int = MAX_BYTES) -> LoraFiles:
    """The adapter in a folder. Raises NotFound, and BadModel for one that octavo does not compute, with the reason.

    With a `digest`, one that has another is refused: its files are others by now. Raises TooLarge, before the weights
    are read, if their file has more than `max_bytes` beside its header.
    """
    if path.suffix == ".gguf":
        raise BadModel(f"{path}: adapters in GGUF files are not read: give the folder that PEFT wrote")
    try:
        for name in (CONFIG, WEIGHTS):
            if not (path / name).is_file():
                raise NotFound(f"{path}: no {name} there, as PEFT writes it", resource="adapter", name=str(path))
        config = read_json(path / CONFIG)
        rank, scale, computed = _read_config(config)
        content = _read_weights(path / WEIGHTS, max_bytes)
        tensors = _read_tensors(content, rank)
        found = _digest(computed, tensors, content)
    except BadModel as error:
        raise BadModel(f"{path}: {error.message}") from None
    except (*_DAMAGE, OSError, struct.error) as error:
        raise BadModel(f"{path}: cannot be read as an adapter: {error}"[:500]) from None
    if digest not in ("", found):
        raise BadModel(f"{path}: the adapter there has the digest {found} now, and {digest} is wanted")
    return LoraFiles(path, found, rank, scale, tensors, content)


def _read_weights(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size - 8 - MAX_HEADER > max_bytes:
            raise TooLarge(f"{path}: an adapter in a file of {size} bytes is not read: it may have {max_bytes}")
        return file.read(size)


def _read_config(config: Any) -> tuple[int, float, bytes]:
    """Rank, scale, and the settings that count for a token in one form of bytes."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise BadModel(f"peft_type {_shown(config, 'peft_type')} is not LORA")
    for name, value in config.items():
        if name not in _COMPUTED and name not in _NOTES and value not in _UNSET:
            raise BadModel(f"{name} {_shown(config, name)} is not computed here: train or convert it without")
    if config.get("bias", "none") != "none":
        raise BadModel(f"bias {_shown(config, 'bias')} is not computed here: only none")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        what = f"init_lora_weights {_shown(config, 'init_lora_weights')}"
        raise BadModel(f"{what} changes the weights of the model: save it as a plain LoRA")
    rank, alpha, rooted = config.get("r"), config.get("lora_alpha"), bool(config.get("use_rslora", False))
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise BadModel(f"r {_shown(config, 'r')} is not a whole number from 1 to {MAX_RANK}")
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise BadModel(f"lora_alpha {_shown(config, 'lora_alpha')} is no number")
    scale = alpha / math.sqrt(rank) if rooted else alpha / rank
    return rank, scale, struct.pack("<Id?", rank, float(alpha), rooted)


def _shown(config: object, name: str) -> str:
    value = config.get(name) if isinstance(config, dict) else None
    return repr(value)[:80]


def _read_tensors(data: bytes, rank: int) -> dict[LoraMatrix, StoredTensor]:
    (size,) = struct.unpack_from("<Q", data)
    if not 2 <= size <= min(MAX_HEADER, len(data) - 8):
        raise BadModel(f"{WEIGHTS} is cut off, or no file of safetensors")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, described in header.items():
        matrix, tensor = _matrix(name), _tensor(name, described, 8 + size, len(data))
        if tensor.shape[0 if matrix.side == "A" else 1] != rank:
            raise BadModel(f"{name} has the shape {list(tensor.shape)}, which is not of rank {rank}")
        if matrix in found:
            raise BadModel(f"tensor {name[:120]} is there twice: once by another spelling of its name")
        found[matrix] = tensor
    for layer, module, _ in found:
        if len({(layer, module, side) for side in "AB"} & found.keys()) != 2:
            raise BadModel(f"layer {layer} has one of lora_A and lora_B of {module}, and not the other")
    if not found:
        raise BadModel(f"{WEIGHTS} has no tensor")
    _check_tiling(found.values(), 8 + size, len(data))
    return found


def _check_tiling(tensors: Iterable[StoredTensor], place: int, end: int) -> None:
    """Every byte of the data is one tensor's, as safetensors has it: what nobody names would not count."""
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if tensor.start != place:
            raise BadModel(f"{WEIGHTS} is damaged: its tensors overlap, or leave gaps")
        place += tensor.num_bytes
    if place != end:
        raise BadModel(f"{WEIGHTS} is damaged: {end - place} bytes at its end are no tensor's")


def _matrix(name: str) -> LoraMatrix:
    match = _TENSOR.fullmatch(name)
    if match is None or match[3] not in MODULES:
        raise BadModel(f"tensor {name[:120]} is not computed here: only lora_A and lora_B of {', '.join(MODULES)}")
    return LoraMatrix(int(match[1]), match[3], match[4])


def _tensor(name: str, described: Mapping[str, Any], start: int, end: int) -> StoredTensor:
    dtype, shape, (first, last) = described["dtype"], described["shape"], described["data_offsets"]
    if dtype not in SIZES:
        raise BadModel(f"tensor {name[:120]} has the type {str(dtype)[:20]}: only {', '.join(SIZES)} are read")
    if len(shape) != 2 or not all(type(size) is int and 0 < size < 1 << 24 for size in shape):
        raise BadModel(f"tensor {name[:120]} has the shape {str(shape)[:40]}")
    tensor = StoredTensor(dtype, (shape[0], shape[1]), start + first)
    are_places = type(first) is type(last) is int and first >= 0
    if not (are_places and last - first == tensor.num_bytes and start + last <= end):
        raise BadModel(f"tensor {name[:120]} does not lie in the file: {WEIGHTS} is cut off or damaged")
    return tensor


def _digest(computed: bytes, tensors: Mapping[LoraMatrix, StoredTensor], data: bytes) -> str:
    state = hashlib.blake2b(digest_size=16, person=b"octavo.lora.v1")
    for part in _parts(computed, tensors, data):
        state.update(struct.pack("<Q", len(part)))
        state.update(part)
    return state.hexdigest()


def _parts(computed: bytes, tensors: Mapping[LoraMatrix, StoredTensor], data: bytes) -> Iterable[bytes | memoryview]:
    yield computed
    view = memoryview(data)
    for matrix in sorted(tensors):
        tensor = tensors[matrix]
        yield f"{matrix.layer} {matrix.module} {matrix.side} {tensor.dtype} {tensor.shape}".encode()
        yield view[tensor.start : tensor.start + tensor.num_bytes]
