"""Tensors of GGUF files: what their number formats mean, and which of them the extension multiplies as they are."""

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as decode
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.models.checkpoint.weights import FLOATS
from octavo.model_files.gguf import GgufFile, TensorType
from octavo.model_files.gguf_support import FLOATS as FLOAT_TYPES
from octavo.model_files.gguf_support import HELD_AS

# The package makes several arrays on the way to its result. Those of a piece stay in the processor's cache: of a whole
# tensor, decoding takes twice as long (docs/decisions/gpu_worker.md).
PIECE_VALUES = 1 << 16
ROPE_FACTORS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
KERNELS = {  # GGUF's types of which nothing is rounded, and what the extension calls their blocks
    TensorType.Q8_0: "q8",
    TensorType.Q4_0: "q4",
    TensorType.Q4_1: "q4_mins",
    TensorType.Q3_K: "q3_k",
    TensorType.Q5_0: "q5",
    TensorType.Q5_1: "q5_mins",
    TensorType.Q4_K: "q4_k",
    TensorType.Q5_K: "q5_k",
    TensorType.Q6_K: "q6_k",
    TensorType.IQ4_NL: "iq4_nl",
    TensorType.IQ4_XS: "iq4_xs",
}
KERNELS |= {kind: KERNELS[held] for kind, held in HELD_AS.items()}


def block_format(kind: TensorType) -> str:
    """What BlockSource.block_format says of a tensor of this type."""
    return FLOATS if kind in FLOAT_TYPES else KERNELS.get(kind, "")


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


def read_tensor(file: GgufFile, name: str) -> Tensor:
    """A tensor in float32, in new memory."""
    info = file.tensors[name]
    num_values = torch.Size(info.shape).numel()
    return torch.from_numpy(dequantize(file.tensor_bytes(name), info.type, num_values)).view(info.shape)
