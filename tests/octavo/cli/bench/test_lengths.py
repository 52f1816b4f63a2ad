"""What `--prompt-tokens` and `--output-tokens` take, and what is drawn from it."""

import random
import statistics

import pytest

from octavo.cli.bench.distributions import parse_lengths


def draws(text, count=4000):
    rng, lengths = random.Random(5), parse_lengths(text)
    return [lengths.draw(rng) for _ in range(count)]


def test_a_number_is_always_that_number():
    assert set(draws("128", 20)) == {128}
    assert parse_lengths("128").mean == 128


def test_a_range_has_both_ends():
    assert set(draws("3-6")) == {3, 4, 5, 6}
    assert parse_lengths("3-6").mean == 4.5


def test_normal_and_lognormal_have_their_parameters():
    assert statistics.mean(draws("normal:200,30")) == pytest.approx(200, rel=0.02)
    assert statistics.stdev(draws("normal:200,30")) == pytest.approx(30, rel=0.1)
    assert statistics.median(draws("lognormal:200,0.5")) == pytest.approx(200, rel=0.05)
    assert statistics.mean(draws("lognormal:200,0.5")) == pytest.approx(
        parse_lengths("lognormal:200,0.5").mean, rel=0.05
    )
    assert min(draws("normal:1,50")) == 1


@pytest.mark.parametrize("text", ["", "0", "-5", "x", "9-3", "1-2-3", "1.5", "normal:5", "poisson:5,2", "normal:nan,1"])
def test_what_is_no_length_is_refused_with_the_forms(text):
    with pytest.raises(ValueError, match="normal:MEAN,DEVIATION"):
        parse_lengths(text)
