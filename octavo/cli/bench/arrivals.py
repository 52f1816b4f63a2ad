"""When requests arrive in an open loop: times that do not depend on how the server answers."""

import random
from collections.abc import Iterator
from dataclasses import dataclass


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
