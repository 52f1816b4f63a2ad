"""How many tokens a prompt or an answer has: always the same number, or one drawn from a distribution."""

import math
import random
from dataclasses import dataclass

MAX_TOKENS = 10_000_000
FORMS = "N, FROM-TO, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA"


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of lengths. `first` and `second` are FROM and TO, MEAN and DEVIATION, or MEDIAN and SIGMA."""

    kind: str  # uniform, normal or lognormal
    first: float
    second: float

    def draw(self, rng: random.Random) -> int:
        """A length of at least 1."""
        if self.kind == "uniform":
            return rng.randint(int(self.first), int(self.second))
        if self.kind == "normal":
            value = rng.gauss(self.first, self.second)
        else:
            value = rng.lognormvariate(math.log(self.first), self.second)
        return min(max(1, round(value)), MAX_TOKENS)

    @property
    def mean(self) -> float:
        if self.kind == "uniform":
            return (self.first + self.second) / 2
        return self.first if self.kind == "normal" else self.first * math.exp(self.second**2 / 2)


def parse_lengths(text: str) -> LengthDistribution:
    """The distribution that a text names. Raises ValueError, with the forms that there are."""
    kind, colon, numbers = text.rpartition(":")
    parts = numbers.split("," if colon else "-")
    try:
        values = [float(part) if colon else int(part) for part in parts]
    except ValueError:
        values = []
    if not colon and len(values) == 1:
        values *= 2
    good = len(values) == 2 and 1 <= values[0] <= MAX_TOKENS
    if not colon:
        good = good and values[0] <= values[1] <= MAX_TOKENS
    else:
        good = good and kind in ("normal", "lognormal") and 0 <= values[1] <= MAX_TOKENS
    if not good:
        raise ValueError(f"{text!r} is no length in tokens from 1 on: write {FORMS}")
    return LengthDistribution(kind or "uniform", values[0], values[1])
