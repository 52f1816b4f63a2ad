"""Chooses the n branches to return of best_of."""

from collections.abc import Sequence


def rank(scores: Sequence[float | None], n: int) -> list[int]:
    """Branches by score, best first, the lower index on ties; those without a score last."""
    order = sorted(range(len(scores)), key=lambda branch: (-(s if (s := scores[branch]) is not None else -1e300), branch))
    return order[:n]
