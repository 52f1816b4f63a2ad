"""How the values of options are read, checked and shown."""

import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.options import options_of, parse_size
from octavo.settings import RouterSettings, UpSettings, WorkerSettings, parse

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
    assert hidden == {"runner", "step_delay_ms", "die_on_token"}
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
