"""Arrivals have the rate and the burstiness that were asked for, and are the same for the same seed."""

import random
from itertools import islice, pairwise

import numpy as np
import pytest

from octavo.cli.bench.distributions import ArrivalProcess

COUNT = 20_000


def gaps(process, seed=0, count=COUNT):
    times = list(islice(process.offsets(random.Random(seed)), count))
    assert times == sorted(times)
    return np.diff([0.0, *times])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_gaps_are_those_of_a_gamma_process(burstiness):
    found = gaps(ArrivalProcess(rate=5.0, burstiness=burstiness))
    assert found.mean() == pytest.approx(0.2, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_poisson_process_forgets():
    found = gaps(ArrivalProcess(rate=5.0))
    assert np.mean(found > 0.2) == pytest.approx(np.exp(-1), abs=0.02)  # exponential
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.03  # independent
    counts = np.bincount(np.cumsum(found).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.1)  # per second: as many as a Poisson number


def test_bursts_arrive_at_once_and_keep_the_rate():
    times = list(islice(ArrivalProcess(rate=5.0, burst_size=8).offsets(random.Random(1)), COUNT))
    assert len(set(times)) == COUNT / 8
    assert COUNT / times[-1] == pytest.approx(5.0, rel=0.1)


def test_a_seed_is_a_list_of_times():
    process = ArrivalProcess(rate=2.0, burstiness=0.5)
    assert list(gaps(process, 3, 50)) == list(gaps(process, 3, 50)) != list(gaps(process, 4, 50))
    assert all(later >= earlier for earlier, later in pairwise(gaps(process, 3, 50).cumsum()))
