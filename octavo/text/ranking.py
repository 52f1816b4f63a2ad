"""Chooses which n of best_of branches are returned."""

from collections.abc import Sequence


def rank(scores: Sequence[float | None], n: int) -> list[int]:
    """The n best branches, best first. Of equal scores the lower index comes first; branches without one come last."""
    worst = float("-inf")
    order = sorted(range(len(scores)), key=lambda b: (-(worst if (score := scores[b]) is None else score), b))
    return order[:n]
