"""Chooses the n branches to return of best_of."""

from collections.abc import Sequence


def rank(scores: Sequence[float | None], n: int) -> list[int]:
    """Branches by score, best first, the lower index on ties; those without a score last."""
    worst = float("-inf")
    order = sorted(range(len(scores)), key=lambda b: (-(worst if (score := scores[b]) is None else score), b))
    return order[:n]
