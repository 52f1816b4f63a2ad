"""Batches of spans of sequences: any first and last token of each, with neither scheduler nor sharing."""

from collections.abc import Sequence

import torch

from gpu_worker.ops import TokenBatch, make_batch

Span = tuple[int, int, int]  # the number of a sequence, its first token in the batch, and the one after the last
Place = tuple[int, int]  # the number of a sequence, and a position in it


def batch_of_spans(
    sequences: Sequence[Sequence[int]], spans: Sequence[Span], tables: Sequence[list[int]], block_size: int
) -> tuple[list[Place], TokenBatch]:
    """The places of the batch's tokens, and the batch."""
    places = [(i, p) for i, first, end in spans for p in range(first, end)]
    batch = make_batch(
        [sequences[i][p] for i, p in places],
        [p for _, p in places],
        [tables[i][p // block_size] * block_size + p % block_size for i, p in places],
        [end - first for _, first, end in spans],
        [end for _, _, end in spans],
        [tables[i] for i, _, _ in spans],
        torch.device("cpu"),
    )
    return places, batch
