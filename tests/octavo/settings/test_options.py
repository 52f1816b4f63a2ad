"""How the values of options are read, checked and shown."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.settings.options import options_of, parse_size
from octavo.settings.router import RouterSettings
from octavo.settings.up import UpSettings
from octavo.settings.worker import WorkerSettings

CLASSES = [RouterSettings, WorkerSettings, UpSettings]


@pytest.mark.parametrize("cls", CLASSES)
def test_no_two_settings_share_a_variable(cls):
    names = [options_of(other)[item.name].variable for other in CLASSES for item in dataclasses.fields(other)]
    assert len(set(names)) == len(names)


@given(
    number=st.integers(0, 10**6), unit=st.sampled_from(["", "B", "KiB", "MiB", "GiB", "TiB", "kB", "MB", "GB", "TB"])
)
def test_sizes(number, unit):
    base = 1024 if "i" in unit else 1000
    power = "bkmgt".index(unit[0].lower()) if unit else 0
    assert parse_size(f"{number}{unit}") == parse_size(f" {number} {unit.lower()} ") == number * base**power


@given(st.text(max_size=30))
def test_sizes_are_total(text):
    try:
        assert parse_size(text) >= 0
    except ValueError as error:
        assert "512MiB" in str(error)  # noqa: PT017 - any other outcome is the failure
