"""Which logits of a row are looked at, where several hosts of a group compute them (octavo/wanted_logits.h in csrc).

A branch that draws among its k likeliest tokens, or takes the likeliest, looks at these and at those that its
adjustments name. Log probabilities, and draws from more tokens, need all logits of their row.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from gpu_worker.sampling.adjustments import Ids, LogitEdit
from gpu_worker.sampling.masks import packed_masks
from gpu_worker.sampling.sampler import is_drawn, is_scored
from gpu_worker.steps.seats import Seat

LIKELIEST, NAMED = 16, 4  # at most this part of the vocabulary: more would cost as much as all logits
_NOTHING: Ids = np.empty(0, dtype=np.int64)


def wanted_logits(
    extension: ModuleType,
    num_rows: int,
    rows: Sequence[int],
    branches: Sequence[Seat],
    edits: Sequence[LogitEdit | None],
    vocab_size: int,
) -> Any:
    """The extension's WantedLogits of branches[i] on row rows[i], whose logits are changed by edits[i]."""
    numbers, masks = [-1] * len(branches), np.zeros((1, -(-vocab_size // 32)), np.int32)
    if any(branch.mask is not None for branch in branches):
        mask_numbers, masks = packed_masks(branches, vocab_size)
        numbers = mask_numbers.tolist()
    left = [*np.bitwise_count(masks.view(np.uint32)).sum(axis=1).tolist(), 0]  # by a mask; by none: not known
    members: list[list[int]] = [[] for _ in range(num_rows)]
    for i, row in enumerate(rows):
        members[row].append(i)
    counts, mask_of = np.zeros(num_rows, np.int32), np.full(num_rows, -1, np.int32)
    named = [_NOTHING] * num_rows
    for row, here in enumerate(members):
        likeliest = [_count(branches[i], edits[i], left[numbers[i]], vocab_size // LIKELIEST) for i in here]
        ids = [ids for i in here if (edit := edits[i]) is not None for ids in _named(edit)]
        distinct = np.unique(np.concatenate(ids)) if ids else _NOTHING
        if all(likeliest) and len(distinct) <= vocab_size // NAMED and len({numbers[i] for i in here}) == 1:
            counts[row], mask_of[row], named[row] = max(likeliest), numbers[here[0]], distinct
    ends = np.cumsum([0, *map(len, named)])
    arrays = (counts, ends, np.concatenate([_NOTHING, *named]), mask_of, masks)
    return extension.WantedLogits(*map(torch.from_numpy, arrays))


def _count(branch: Seat, edit: LogitEdit | None, left: int, most: int) -> int:
    """How many of the likeliest the branch looks at; 0: it needs all. `left`: how many tokens its mask leaves it."""
    params = branch.params
    if is_scored(params):
        return 0
    if not is_drawn(params) or (edit is not None and edit.allowed is not None):
        return 1  # whether there is one
    return min((limit for limit in (params.top_k, left) if 0 < limit <= most), default=0)


def _named(edit: LogitEdit) -> tuple[Ids, Ids, Ids]:
    return edit.seen, edit.bias_ids, _NOTHING if edit.allowed is None else edit.allowed
