"""Masks that leave to a branch only some tokens: a bit per token of the vocabulary, the least bit of a byte first.

A mask acts on the draw alone. Log probabilities are those of the logits before it, so a token that was forced still
says how likely the model held it.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.steps.seats import Seat

Words = NDArray[np.int32]


def packed_masks(branches: Sequence[Seat], vocab_size: int) -> tuple[Words, Words]:
    """For each branch the number of its mask (-1: none), and the masks [number, words]: those of a step as they lie."""
    size = -(-vocab_size // 32) * 4
    masks = [branch.mask for branch in branches if branch.mask is not None]
    buffer = masks[0].buffer
    if masks[0].size == size and all(mask.buffer is buffer for mask in masks):
        numbers = [-1 if branch.mask is None else branch.mask.row for branch in branches]
    else:
        buffer = bytearray().join(bytes(mask)[:size].ljust(size, b"\0") for mask in masks)
        count = itertools.count()
        numbers = [-1 if branch.mask is None else next(count) for branch in branches]
    return np.array(numbers, np.int32), np.frombuffer(buffer, np.int32).reshape(-1, size // 4)


def confine(x: Tensor, masks: Tensor) -> Tensor:
    """`x` [rows, vocabulary] with -inf for each token that a row's mask [rows, words] does not allow."""
    shifts = torch.arange(32, dtype=torch.int32, device=x.device)
    bits = (masks.unsqueeze(-1) >> shifts) & 1
    return x.masked_fill(bits.view(len(x), -1)[:, : x.shape[1]] == 0, -torch.inf)
