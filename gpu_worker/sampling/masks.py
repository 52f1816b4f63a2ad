"""Masks that leave to a branch only some tokens: a bit per token of the vocabulary, the least bit of a byte first.

A mask acts on the draw alone. Log probabilities are those of the logits before it, so a token that was forced still
says how likely the model held it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.steps.seats import Seat

Words = NDArray[np.int32]


def packed_masks(branches: Sequence[Seat], vocab_size: int) -> tuple[Words, Words]:
    """For each branch which mask it has (-1: none), and the masks [number, words] in words of 32 bits."""
    size = -(-vocab_size // 32) * 4
    masks = [branch.mask[:size].ljust(size, b"\0") for branch in branches if branch.mask is not None]
    has_mask = np.array([branch.mask is not None for branch in branches])
    numbers = np.where(has_mask, np.cumsum(has_mask) - 1, -1).astype(np.int32)
    return numbers, np.frombuffer(bytearray().join(masks), dtype=np.int32).reshape(len(masks), size // 4)


def confine(x: Tensor, masks: Tensor) -> Tensor:
    """`x` [rows, vocabulary] with -inf for each token that a row's mask [rows, words] does not allow."""
    shifts = torch.arange(32, dtype=torch.int32, device=x.device)
    bits = (masks.unsqueeze(-1) >> shifts) & 1
    return x.masked_fill(bits.view(len(x), -1)[:, : x.shape[1]] == 0, -torch.inf)
