"""Grids: every combination of some sizes and types, in an order in which the first few are spread over all."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

ORDER = 20261123


class Grid:
    """`run(rng, **combination)` for each combination of the axes that `has`."""

    def __init__(self, run: Callable[..., None], has: Callable[..., bool] | None = None, **axes: Sequence[Any]) -> None:
        self.run = run
        found = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
        found = [one for one in found if has is None or has(**one)]
        self.combinations = [found[i] for i in np.random.default_rng(ORDER).permutation(len(found))]

    def __len__(self) -> int:
        return len(self.combinations)

    def case(self, rng: Any, index: int) -> None:
        combination = self.combinations[index]
        try:
            self.run(rng, **combination)
        except BaseException as error:
            error.add_note(f"{self.run.__name__}: {combination}")
            raise


def require_close(got: np.ndarray, want: np.ndarray, atol: float, rtol: float, what: str) -> None:
    """As torch.testing.assert_close: each number by itself."""
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    wrong = ~(np.abs(got - want) <= atol + rtol * np.abs(want))
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.size} numbers, up to {np.abs(got - want).max():.2e} off"
