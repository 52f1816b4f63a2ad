"""The further filters of a draw: what top-k, top-p and min-p keep, they narrow down, one after another.

Each is a function of one row: of the powers and weights (draw.py) of the tokens that are kept, of the row's parameters,
and of where its random numbers come from. It returns which tokens stay. csrc/include/octavo/filters.h has each once
more, for the extension; both keep the same tokens, bit for bit.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.request.sampling import PARAMETERS, SamplingParams

Floats = NDArray[np.float32]
Weights = NDArray[np.int64]
Mask = NDArray[np.bool_]
Chance = Callable[[int], int]  # 53 random bits; its argument is another one for each filter, and 0 for the draw

COLUMNS = tuple(row.name for row in PARAMETERS.values() if row.is_filter)
_OFF = np.array([PARAMETERS[name].default for name in COLUMNS], dtype=np.float32)


def columns_of(params: Sequence[SamplingParams]) -> Floats:
    """The parameters of the filters, a row for each of `params`."""
    listed = [[getattr(p, name) for name in COLUMNS] for p in params]
    return np.array(listed, dtype=np.float32).reshape(len(params), len(COLUMNS))


def filtered_rows(columns: Floats) -> NDArray[np.intp]:
    """The rows in which a filter may leave out tokens."""
    return np.flatnonzero((columns != _OFF).any(axis=1))


def kept_tokens(powers: Floats, weights: Weights, columns: Floats, chance: Chance) -> Mask:
    """Which tokens of a row all filters keep, of those that weigh something."""
    stays, values = weights > 0, dict(zip(COLUMNS, columns, strict=True))
    for narrow in FILTERS:
        stays[stays] = narrow(powers[stays], weights[stays], values, chance)
    return stays


FILTERS: tuple[Callable[[Floats, Weights, dict[str, np.float32], Chance], Mask], ...] = ()
