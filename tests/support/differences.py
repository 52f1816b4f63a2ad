"""How far tensors are from what they should be."""

import torch


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, over the largest number that is expected."""
    return float((found - expected).abs().max() / expected.abs().max())
