"""What a block's checksum is, on any device (csrc/include/octavo/checksum.h)."""

import numpy as np


def checksum(layers: np.ndarray) -> int:
    """Of one block's bytes uint8 [layers, bytes], as the int64 that ops give."""
    count, length = layers.shape
    padded = np.zeros((count, -(-length // 8) * 8), dtype=np.uint8)
    padded[:, :length] = layers
    x = padded.view("<u8").reshape(-1)
    x = x + (np.arange(len(x), dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return int((x ^ x >> np.uint64(31)).sum().view(np.int64))
