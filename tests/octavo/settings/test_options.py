"""How the values of options are read, checked and shown."""

import dataclasses
import tomllib
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


@given(st.text(max_size=30))
def test_sizes_are_total(text):
    try:
        assert parse_size(text) >= 0
    except ValueError as error:
        assert "512MiB" in str(error)  # noqa: PT017 - any other outcome is the failure


@pytest.mark.parametrize("text", ["-1", "1.5.5", "MiB", "", "1e9", "9" * 400, "1 MiB x"])
def test_what_is_not_a_size(text):
    with pytest.raises(ValueError, match="512MiB"):
        parse_size(text)


def test_a_hidden_setting_works_and_is_in_no_help(capsys):
    with pytest.raises(SystemExit):
        parse(WorkerSettings, ["--help"], environ={})
    helped = capsys.readouterr().out
    for name, option in options_of(WorkerSettings).items():
        assert (option.flag in helped) != option.hidden, name
    hidden = {name for name, option in options_of(WorkerSettings).items() if option.hidden}
    assert hidden == {"runner", "numerics", "step_delay_ms", "die_on_token", "failpoints"}
    assert parse(WorkerSettings, ["--runner=fake"], environ={}).runner == "fake"


def test_a_hidden_setting_is_printed_only_where_it_is_given(capsys):
    printed = []
    for argv in ([], ["--runner=fake"]):
        with pytest.raises(SystemExit):
            parse(WorkerSettings, [*argv, "--print-config"], environ={})
        printed.append(tomllib.loads(capsys.readouterr().out)["worker"])
    assert "runner" not in printed[0]
    assert printed[1]["runner"] == "fake"
    assert "die_on_token" not in printed[1]


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


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("gpu_memory_utilization", "0"), ("gpu_memory_utilization", "1.1"), ("watermark", "1"), ("watermark", "-0.1")],
)
def test_a_share_is_between_none_and_all(capsys, name, wrong):
    with pytest.raises(SystemExit):
        parse(WorkerSettings, [f"--{name.replace('_', '-')}={wrong}"], environ={})
    assert f"{name} '{wrong}'" in capsys.readouterr().err
