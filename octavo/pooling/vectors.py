"""Vectors compared: sums are exact, so that equal vectors give equal scores in whatever order they are added."""

import math
from collections.abc import Sequence


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    """The cosine of the angle between two vectors of one length; 0 if one of them is all zeros."""
    return cosines([left, right], [(0, 1)])[0]


def cosines(vectors: Sequence[Sequence[float]], pairs: Sequence[tuple[int, int]]) -> list[float]:
    """The cosine of each pair, which are places of vectors. The length of a vector is computed once."""
    lengths = [math.sqrt(squared(vector)) for vector in vectors]
    scores = []
    for left, right in pairs:
        norms = lengths[left] * lengths[right]
        dot = math.fsum(a * b for a, b in zip(vectors[left], vectors[right], strict=True))
        scores.append(max(-1.0, min(1.0, dot / norms)) if norms else 0.0)
    return scores


def squared(vector: Sequence[float]) -> float:
    """The square of a vector's length."""
    return math.fsum(each * each for each in vector)


def likelihood(yes: float, no: float) -> float:
    """The softmax of two logits: how likely the first is against the second."""
    difference = no - yes
    return 1.0 / (1.0 + math.exp(difference)) if difference < 700 else 0.0
