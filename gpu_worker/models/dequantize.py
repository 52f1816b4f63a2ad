"""GGUF's number formats as float32: the gguf package decodes, a piece of a tensor at a time."""

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as decode
from numpy.typing import NDArray

from octavo.errors import BadModel
from octavo.gguf import BLOCK_SIZES, TensorInfo, TensorType

FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)
DECODED = (
    *FLOATS,
    *(TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0, TensorType.Q5_1, TensorType.Q8_0),
    *(TensorType.Q2_K, TensorType.Q3_K, TensorType.Q4_K, TensorType.Q5_K, TensorType.Q6_K),
    *(TensorType.IQ1_S, TensorType.IQ1_M, TensorType.IQ2_XXS, TensorType.IQ2_XS, TensorType.IQ2_S),
    *(TensorType.IQ3_XXS, TensorType.IQ3_S, TensorType.IQ4_NL, TensorType.IQ4_XS),
    *(TensorType.TQ1_0, TensorType.TQ2_0, TensorType.MXFP4),
)

# The package makes several arrays on the way to its result. Those of a piece stay in the processor's cache: of a whole
# tensor, decoding takes twice as long (docs/decisions/gpu_worker.md).
PIECE_VALUES = 1 << 16


def check_decoded(file_name: str, tensor: TensorInfo) -> None:
    """BadModel unless the tensor's type is one of DECODED."""
    if tensor.type not in DECODED:
        known = ", ".join(kind.name for kind in DECODED)
        what = f"{file_name}: tensor {tensor.name!r} is of type {tensor.type.name}"
        raise BadModel(f"{what}, which is not read ({known} are)")


def dequantize(data: memoryview, kind: TensorType, num_values: int) -> NDArray[np.float32]:
    """The values of a tensor whose type is one of DECODED, in order, in new memory."""
    stored = np.frombuffer(data, dtype=np.uint8)
    values = np.empty(num_values, dtype=np.float32)
    block, block_bytes = BLOCK_SIZES[kind]
    for start in range(0, num_values, PIECE_VALUES):
        end = min(start + PIECE_VALUES, num_values)
        piece = stored[start // block * block_bytes : end // block * block_bytes]
        values[start:end] = decode(piece, GGMLQuantizationType(kind))
    return values
