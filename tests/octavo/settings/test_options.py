"""How the values of options are read, checked and shown."""

import dataclasses
from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.settings.loading import parse
from octavo.settings.options import AUTO, options_of, parse_size
from octavo.settings.router import RouterSettings
from octavo.settings.setting_sources import arguments_of, describe, effective_values
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


def test_a_number_that_may_be_automatic(config):
    def given(*argv, file=None):
        return parse(WorkerSettings, [*argv, *([f"--config={file}"] if file else [])], environ={}).swap_bytes

    assert given() == given("--swap-bytes=auto") == given(file=config("[worker]\nswap_bytes = 'auto'\n")) == AUTO
    assert given("--swap-bytes=0") == given(file=config("[worker]\nswap_bytes = 0\n")) == 0
    assert given("--swap-bytes=1MiB") == 2**20
    for wrong in (["--swap-bytes=-1"], ["--swap-bytes=automatic"]):
        with pytest.raises(SystemExit):
            given(*wrong)
    with pytest.raises(SystemExit):
        given(file=config("[worker]\nswap_bytes = -1\n"))
    assert parse(WorkerSettings, arguments_of(WorkerSettings()), environ={}) == WorkerSettings()
    assert options_of(WorkerSettings)["swap_bytes"].to_text(AUTO) == "auto"
    assert 'swap_bytes = "auto"' in describe(WorkerSettings, effective_values(WorkerSettings, Namespace(), {}, None))
