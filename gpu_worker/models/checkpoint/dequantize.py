"""GGUF's number formats as float32: the gguf package decodes, a piece of a tensor at a time."""

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as decode
from numpy.typing import NDArray

from octavo.model_files.gguf import TensorType

# The package makes several arrays on the way to its result. Those of a piece stay in the processor's cache: of a whole
# tensor, decoding takes twice as long (docs/decisions/gpu_worker.md).
PIECE_VALUES = 1 << 16


def dequantize(data: memoryview, kind: TensorType, num_values: int) -> NDArray[np.float32]:
    """The values of a tensor whose type is one of gguf_support.DECODED, in order, in new memory."""
    stored = np.frombuffer(data, dtype=np.uint8)
    values = np.empty(num_values, dtype=np.float32)
    block, block_bytes = kind.block, kind.num_bytes
    for start in range(0, num_values, PIECE_VALUES):
        end = min(start + PIECE_VALUES, num_values)
        piece = stored[start // block * block_bytes : end // block * block_bytes]
        with np.errstate(all="ignore"):  # scales that are no numbers make weights that are none
            values[start:end] = decode(piece, GGMLQuantizationType(kind))
    return values
