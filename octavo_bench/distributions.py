"""How many tokens prompts and answers have, and when requests of an open loop arrive."""

import math
import random
from collections.abc import Iterator
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


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """Arrivals at `rate` per second on average.

    The gaps between bursts have a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is more
    bursty, more is more even. `burst_size` requests arrive at the same moment.
    """

    rate: float
    burstiness: float = 1.0
    burst_size: int = 1

    def offsets(self, rng: random.Random) -> Iterator[float]:
        """Seconds from the beginning of a round to each arrival, without an end."""
        scale = self.burst_size / self.rate / self.burstiness
        now = 0.0
        while True:
            now += rng.gammavariate(self.burstiness, scale)
            for _ in range(self.burst_size):
                yield now
