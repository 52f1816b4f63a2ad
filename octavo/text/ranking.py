"""Chooses which n of best_of branches are returned."""

from collections.abc import Sequence


def rank(scores: Sequence[float | None], n: int) -> list[int]:
    """The n best branches, best first. Equal scores keep their order; branches without a score come last."""
    worst = float("-inf")
    order = sorted(range(len(scores)), key=lambda b: (-(worst if (score := scores[b]) is None else score), b))
    return order[:n]
