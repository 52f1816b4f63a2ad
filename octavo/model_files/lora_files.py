"""A low-rank adapter on disk: adapter_config.json beside adapter_model.safetensors, as PEFT writes it, or a GGUF file.

`read_lora` says what the adapter is and where its numbers lie, and names it by a digest of all that counts for a
token: every number with its type, shape and place, and rank, alpha and rule of scaling. What octavo does not compute is
refused by its name: nothing of an adapter is left out in silence. Needs neither torch nor safetensors.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from octavo.model_files import lora_gguf
from octavo.model_files.json_file import read_json
from octavo.model_files.lora_config import read_scaling
from octavo.model_files.lora_tensors import MODULES, LoraMatrix, StoredTensor, check_numbers, check_pairs, stored_tensor
from octavo.request.errors import BadModel, MalformedGguf, NotFound, TooLarge

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_HEADER = 64 << 20
MAX_BYTES = 2 << 30  # of a file's numbers, where nobody says less
_TENSOR = re.compile(
    r"base_model\.model\.(?:(?:model\.)?language_model\.)?"
    r"((?:model\.)?layers\.(\d{1,4})\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight"
)
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)  # what odd files lead to


@dataclass(frozen=True, slots=True)
class LoraFiles:
    """What a folder or a GGUF file has."""

    path: Path
    digest: str  # 32 hex digits
    rank: int  # the largest
    scale: float  # what b · a · x is multiplied with
    tensors: Mapping[LoraMatrix, StoredTensor]
    content: bytes = field(repr=False)  # where the numbers lie, as they were when the digest was computed
    scales: Mapping[tuple[int, str], float] = field(default_factory=dict)  # of layers' modules with another scale
    interleaved: bool = False  # rows of queries and keys come in pairs, as llama.cpp has them for some models

    @property
    def num_bytes(self) -> int:
        """Of its numbers."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


class _ReadFiles(NamedTuple):
    """What a digest is taken of."""

    scaling: bytes
    scale: float
    tensors: dict[LoraMatrix, StoredTensor]
    content: bytes
    scales: dict[tuple[int, str], float]
    interleaved: bool = False


def read_lora(path: Path, digest: str = "", max_bytes: int = MAX_BYTES) -> LoraFiles:
    """The adapter in a folder, or in a GGUF file. Raises NotFound, and BadModel for one that octavo does not compute,
    with the reason.

    With a `digest`, one that has another is refused: its files are others by now. Raises TooLarge, before the weights
    are read, if their file has more than `max_bytes` beside its header.
    """
    try:
        read = _read_gguf(path, max_bytes) if path.suffix == ".gguf" else _read_folder(path, max_bytes)
        check_pairs(read.tensors)
        check_numbers(read.tensors, read.content)
        found = _digest(read)
    except (BadModel, MalformedGguf) as error:
        raise BadModel(f"{path}: {error.message}") from None
    except (*_DAMAGE, OSError, struct.error) as error:
        raise BadModel(f"{path}: cannot be read as an adapter: {error}"[:500]) from None
    if digest not in ("", found):
        raise BadModel(f"{path}: the adapter there has the digest {found} now, and {digest} is wanted")
    rank = max(tensor.shape[0] for matrix, tensor in read.tensors.items() if matrix.side == "A")
    return LoraFiles(path, found, rank, read.scale, read.tensors, read.content, read.scales, read.interleaved)


def files_of(path: Path) -> list[Path]:
    """The files that `read_lora` reads."""
    return [path] if path.suffix == ".gguf" else [path / CONFIG, path / WEIGHTS]


def _read_gguf(path: Path, max_bytes: int) -> _ReadFiles:
    if not path.is_file():
        raise _missing(path, f"no file {path.name} there")
    _check_size(path, path.stat().st_size, max_bytes)
    found = lora_gguf.read(path)
    scaling = struct.pack("<Id?", found.rank, found.alpha, False)
    return _ReadFiles(scaling, found.scale, found.tensors, found.content, found.scales, found.interleaved)


def _read_folder(path: Path, max_bytes: int) -> _ReadFiles:
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise _missing(path, _what_is_missing(path, name))
    try:
        config = read_json(path / CONFIG)
    except ValueError as error:
        raise BadModel(f"{CONFIG} is not JSON: {error}; copy it again") from None
    scaling = read_scaling(config)
    content = _read_weights(path / WEIGHTS, max_bytes)
    tensors, scales = {}, {}
    for name, stored in _read_tensors(content):
        matrix, module = _matrix(name)
        if stored.shape[0 if matrix.side == "A" else 1] != scaling.rank_of(module):
            raise BadModel(f"{name} has the shape {list(stored.shape)}, which is not of rank {scaling.rank_of(module)}")
        if matrix in tensors:
            raise BadModel(f"tensor {name[:120]} is there twice: once by another spelling of its name")
        tensors[matrix] = stored
        if (scale := scaling.scale_of(module)) != scaling.scale:
            scales[matrix.layer, matrix.module] = scale
    if not tensors:
        raise BadModel(f"{WEIGHTS} has no tensor")
    return _ReadFiles(scaling.pack(), scaling.scale, tensors, content, scales)


def _what_is_missing(path: Path, name: str) -> str:
    if not path.exists():
        return "there is no such folder on this machine; give one that the router and all workers can read by this path"
    if not path.is_dir():
        return "is a file: give the folder that PEFT wrote, or a file that ends in .gguf"
    if name == WEIGHTS and (path / PICKLE).is_file():
        how = "save it anew with PEFT's save_pretrained(folder, safe_serialization=True)"
        return f"it has {PICKLE}, a pickle, which may contain code, and no {WEIGHTS}: {how}"
    if found := sorted(each.name for each in path.glob("*.gguf")):
        return f"no {name} there, but {found[0]}: give the path of that file"
    return f"no {name} there, as PEFT writes it" if any(path.iterdir()) else f"the folder is empty: it has no {name}"


def _missing(path: Path, what: str) -> NotFound:
    return NotFound(f"{path}: {what}", resource="adapter", name=str(path))


def _check_size(path: Path, size: int, max_bytes: int) -> None:
    if size - 8 - MAX_HEADER > max_bytes:
        raise TooLarge(f"{path}: an adapter in a file of {size} bytes is not read: it may have {max_bytes}")


def _read_weights(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(path, size, max_bytes)
        return file.read(size)


def _read_tensors(data: bytes) -> list[tuple[str, StoredTensor]]:
    size = int.from_bytes(data[:8], "little")
    if not 2 <= size <= min(MAX_HEADER, len(data) - 8):
        raise BadModel(f"{WEIGHTS} is cut off, or no file of safetensors: copy it again")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = []
    for name, described in header.items():
        _matrix(name)  # before its type and shape: what is not computed may have any
        found.append((name, _tensor(name, described, 8 + size, len(data))))
    _check_tiling([tensor for _, tensor in found], 8 + size, len(data))
    return found


def _check_tiling(tensors: Iterable[StoredTensor], place: int, end: int) -> None:
    """Every byte of the data is one tensor's, as safetensors has it: what nobody names would not count."""
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if tensor.start != place:
            raise BadModel(f"{WEIGHTS} is damaged: its tensors overlap, or leave gaps")
        place += tensor.num_bytes
    if place != end:
        raise BadModel(f"{WEIGHTS} is damaged: {end - place} bytes at its end are no tensor's")


def _matrix(name: str) -> tuple[LoraMatrix, str]:
    """Which matrix a tensor is, and the name of its module in the model."""
    match = _TENSOR.fullmatch(name)
    if match is None or match[3] not in MODULES:
        raise BadModel(f"tensor {name[:120]} is not computed here: only lora_A and lora_B of {', '.join(MODULES)}")
    return LoraMatrix(int(match[2]), match[3], match[4]), match[1]


def _tensor(name: str, described: Mapping[str, Any], start: int, end: int) -> StoredTensor:
    dtype, shape, (first, last) = described["dtype"], described["shape"], described["data_offsets"]
    tensor = stored_tensor(name, dtype, shape, start + first)
    are_places = type(first) is type(last) is int and first >= 0
    if not (are_places and last - first == tensor.num_bytes and start + last <= end):
        raise BadModel(f"tensor {name[:120]} does not lie in the file: {WEIGHTS} is cut off or damaged")
    return tensor


def _digest(read: _ReadFiles) -> str:
    state = hashlib.blake2b(digest_size=16, person=b"octavo.lora.v1")
    for part in _parts(read):
        state.update(struct.pack("<Q", len(part)))
        state.update(part)
    return state.hexdigest()


def _parts(read: _ReadFiles) -> Iterable[bytes | memoryview]:
    yield read.scaling
    if read.scales:
        yield repr(sorted(read.scales.items())).encode()
    if read.interleaved:
        yield b"interleaved"
    view = memoryview(read.content)
    for matrix in sorted(read.tensors):
        tensor = read.tensors[matrix]
        yield f"{matrix.layer} {matrix.module} {matrix.side} {tensor.dtype} {tensor.shape}".encode()
        yield view[tensor.start : tensor.start + tensor.num_bytes]
