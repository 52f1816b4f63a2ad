"""The matrices of a low-rank adapter in a file, whatever the file's form: which there may be, and of which numbers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from octavo.request.errors import BadModel

SIZES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of a number, by safetensors' names
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PIECE = 1 << 20  # bytes that are looked at together


class LoraMatrix(NamedTuple):
    """Where one matrix lies."""

    layer: int
    module: str  # one of MODULES
    side: str  # "A": [rank, inputs], "B": [outputs, rank]


class StoredTensor(NamedTuple):
    """Its type by safetensors' name, its shape, where its bytes begin, and what the file calls it."""

    dtype: str
    shape: tuple[int, int]
    start: int
    name: str

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * SIZES[self.dtype]


def stored_tensor(name: str, dtype: str, shape: Sequence[int], start: int) -> StoredTensor:
    """Raises BadModel for a type or a shape that no matrix of an adapter has."""
    if dtype not in SIZES:
        raise BadModel(f"tensor {name[:120]} has the type {str(dtype)[:20]}: only {', '.join(SIZES)} are read")
    if len(shape) != 2 or not all(type(size) is int and 0 < size < 1 << 24 for size in shape):
        raise BadModel(f"tensor {name[:120]} has the shape {str(shape)[:40]}")
    return StoredTensor(dtype, (shape[0], shape[1]), start, name)


def check_pairs(tensors: Mapping[LoraMatrix, StoredTensor]) -> None:
    """Raises BadModel unless each module has both matrices, of one rank, and none is there beside its parts."""
    for layer, module, _ in tensors:
        a, b = (tensors.get(LoraMatrix(layer, module, side)) for side in "AB")
        if a is None or b is None:
            raise BadModel(f"layer {layer} has one of lora_A and lora_B of {module}, and not the other")
        if a.shape[0] != b.shape[1]:
            raise BadModel(f"{b.name} has the shape {list(b.shape)}, which is not of rank {a.shape[0]}")
        if any(LoraMatrix(layer, part, "A") in tensors for part in _JOINED.get(module, ())):
            raise BadModel(f"layer {layer} has {module} and parts of it")


def check_numbers(tensors: Mapping[LoraMatrix, StoredTensor], content: bytes) -> None:
    """Raises BadModel, with the tensor's name, for a number that is infinite or none: with it no token is one."""
    view = memoryview(content)
    for tensor in tensors.values():
        if _has_odd_number(tensor.dtype, view[tensor.start : tensor.start + tensor.num_bytes]):
            raise BadModel(f"tensor {tensor.name[:120]} has numbers that are infinite or NaN: train it again")


# A number is infinite or none if all bits of its exponent are 1. Which bytes have theirs set: 1; others: 0.
_HALF = bytes(byte & 0x7C == 0x7C for byte in range(256))  # the high byte of a float16 has the whole exponent
_HIGH = bytes(byte & 0x7F == 0x7F for byte in range(256))
_LOW = bytes(byte >> 7 for byte in range(256))


def _has_odd_number(dtype: str, data: memoryview) -> bool:
    """Whole pieces are translated and compared as large integers: a router has no numpy."""
    size = SIZES[dtype]
    for start in range(0, len(data), _PIECE):
        piece = bytes(data[start : start + _PIECE])
        high = piece[size - 1 :: size]
        if dtype == "F16":
            odd = int.from_bytes(high.translate(_HALF))
        else:
            low = piece[size - 2 :: size]
            odd = int.from_bytes(high.translate(_HIGH)) & int.from_bytes(low.translate(_LOW))
        if odd:
            return True
    return False
