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
    listed = [[getattr(p, name) for name in COLUMNS] for p in params]
    return np.array(listed, dtype=np.float32).reshape(len(params), len(COLUMNS))


def filtered_rows(columns: Floats) -> NDArray[np.intp]:
    return np.flatnonzero((columns != _OFF).any(axis=1))


def kept_tokens(powers: Floats, weights: Weights, columns: Floats, chance: Chance) -> Mask:
    """Which tokens of a row all filters keep, of those that weigh something."""
    stays, values = weights > 0, dict(zip(COLUMNS, columns, strict=True))
    for narrow in FILTERS:
        stays[stays] = narrow(powers[stays], weights[stays], values, chance)
    return stays


def _typical(powers: Floats, weights: Weights, values: dict[str, np.float32], chance: Chance) -> Mask:
    """Locally typical sampling (Meister et al., 2022).

    Keeps the tokens whose surprise is nearest to the expected one, as many as have `typical_p` of the mass; of equally
    near ones all. Surprise is minus the power, but for a constant. Its expectation is a quotient of whole numbers.
    """
    if values["typical_p"] >= 1:
        return np.ones(len(powers), dtype=bool)
    mass, moment = int(weights.sum()), int(np.rint(weights.astype(np.float32) * -powers).astype(np.int64).sum())
    distance = np.abs(-powers - np.float32(float(moment) / float(mass)))
    order = np.argsort(distance, kind="stable")
    target = max(1, int(float(values["typical_p"]) * float(mass)))
    last = int(np.searchsorted(np.cumsum(weights[order]), target))
    mask: Mask = distance <= distance[order[last]]
    return mask


def _without_top_choices(powers: Floats, weights: Weights, values: dict[str, np.float32], chance: Chance) -> Mask:
    """Exclude Top Choices (p-e-w, 2024), with the chance of `xtc_probability`.

    Of the tokens with at least `xtc_threshold` of the mass, keeps the least likely alone, and those as likely as it.
    """
    likely = weights >= float(values["xtc_threshold"]) * float(weights.sum())
    if not likely.any() or chance(1) >= float(values["xtc_probability"]) * 2.0**53:
        return np.ones(len(powers), dtype=bool)
    mask: Mask = powers <= powers[likely].min()
    return mask


FILTERS = (_typical, _without_top_choices)
