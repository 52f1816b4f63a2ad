"""The settings of the programs, and what --print-config prints."""

import argparse
import ast
import inspect
import textwrap
import tomllib
from collections.abc import Iterable

import pytest

from octavo.settings import setting_sources
from octavo.settings.loading import CONFIG_VARIABLE, add_common_arguments, from_args, parse
from octavo.settings.options import SettingsError, options_of
from octavo.settings.router import RouterSettings
from octavo.settings.up import UP_DECIDES, UpSettings
from octavo.settings.worker import WorkerSettings


def test_parse_ends_with_the_closest_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(WorkerSettings, ["--kv-cach-bytes=1"], environ={})
    assert caught.value.code == 2
    assert "did you mean --kv-cache-bytes?" in capsys.readouterr().err


def test_parse_reads_the_file_named_in_the_environment_and_prints(config, capsys):
    file = config("[router]\nmax_streams = 5\nmodel_aliases = ['a=b', 'c=d']\n")
    environ = {CONFIG_VARIABLE: str(file)}
    assert parse(RouterSettings, [], environ=environ) == RouterSettings(max_streams=5, model_aliases=("a=b", "c=d"))
    with pytest.raises(SystemExit) as caught:
        parse(RouterSettings, ["--print-config"], environ=environ)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert tomllib.loads(out)["router"]["max_streams"] == 5
    assert f"{file} [router]" in out


def test_the_environment_is_read_in_one_file(root):
    readers = [
        path.relative_to(root).as_posix()
        for package in ("octavo", "router", "gpu_worker")
        for path in (root / package).rglob("*.py")
        if any(name in path.read_text() for name in ("os.environ", "getenv", "from os import environ"))
    ]
    assert readers == ["octavo/settings/loading.py"]


def test_a_command_with_several_classes_prints_one_file(config, capsys):
    parser = argparse.ArgumentParser()
    add_common_arguments(parser, (UpSettings, RouterSettings, WorkerSettings))
    for cls in (UpSettings, RouterSettings, WorkerSettings):
        setting_sources.add_arguments(parser, cls, skip=UP_DECIDES)
    args = parser.parse_args(["--print-config", "--threads=3"])
    with pytest.raises(SystemExit):
        from_args(UpSettings, args, environ={})
    tables = tomllib.loads(capsys.readouterr().out)
    assert set(tables) == {"up", "router", "worker"}
    assert tables["worker"]["threads"] == 3
    assert not tables["worker"].keys() & {"model", "device", "store", "listen", "worker_id"}


@pytest.mark.parametrize(
    ("table", "variable", "why"),
    [
        ("[worker]\nmodel = 'x'", {}, r"^model \(from .* \[worker\]\): `octavo up` .*; set it in \[up\]$"),
        (
            "[router]\nlisten = 'a:1'",
            {},
            r"^listen \(from .* \[router\]\): `octavo up` .*; give --host and --grpc-port$",
        ),
        (
            "[worker]\nrole = 'decode'",
            {},
            r"^role \(from .* \[worker\]\): .*; give --prefill-workers and --decode-workers$",
        ),
        ("", {"OCTAVO_WORKER_STORE": "redis://h"}, r"^store \(from OCTAVO_WORKER_STORE\): .*; set it in \[up\]$"),
        ("", {"OCTAVO_WORKER_ID": "w"}, r"^worker_id \(from OCTAVO_WORKER_ID\): .*; leave it out$"),
    ],
)
def test_what_up_decides_is_set_nowhere_else(config, table, variable, why):
    args = argparse.Namespace(config=str(config(f"[up]\nmodel = 'y'\n{table}\n")))
    with pytest.raises(SettingsError, match=why):
        from_args(UpSettings, args, environ=variable)


@pytest.mark.parametrize(
    ("text", "variable", "why"),
    [
        ("[up]\nmove_limit = 4", {}, r"\[up\] has no setting move_limit; it stands in \[worker\]$"),
        ("[up]\nlease_ms = 4", {}, r"it stands in \[router\] and \[worker\]$"),
        ("", {"OCTAVO_UP_MOVE_LIMIT": "4"}, "OCTAVO_UP_MOVE_LIMIT; it is OCTAVO_WORKER_MOVE_LIMIT$"),
        ("", {"OCTAVO_UP_LEASE_MS": "4"}, "; it is OCTAVO_ROUTER_LEASE_MS and OCTAVO_WORKER_LEASE_MS$"),
        ("", {"OCTAVO_UP_WORKER": "4"}, "; did you mean OCTAVO_UP_WORKERS\\?$"),
    ],
)
def test_a_setting_of_a_program_that_up_starts_has_that_programs_name(config, text, variable, why):
    args = argparse.Namespace(config=str(config(text)))
    with pytest.raises(SettingsError, match=why):
        from_args(UpSettings, args, environ=variable)


def test_a_flag_of_up_is_for_all_its_programs():
    args = argparse.Namespace(model="z", lease_ms="500")
    assert from_args(UpSettings, args, environ={}).model == "z"
    assert from_args(WorkerSettings, args, environ={}).lease_ms == 500


def names_read(sources: Iterable[str], of: tuple[str, ...]) -> set[str]:
    """The names of attributes that the sources read of a variable, or of an attribute, that is called one of `of`."""
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return {
        node.attr
        for node in nodes
        if isinstance(node.ctx, ast.Load)
        and (node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")) in of
    }


def test_what_counts_as_reading_a_setting():
    source = "settings.a; self._settings.b; settings.c = 1; other.d; replace(settings, e=1); wanted.up.f"
    assert names_read([source], ("settings", "_settings")) == {"a", "b"}
    assert names_read([source], ("up",)) == {"f"}


@pytest.mark.parametrize(
    ("cls", "folder", "variables"),
    [
        (RouterSettings, "router", ("settings", "_settings")),
        (WorkerSettings, "gpu_worker", ("settings", "_settings")),
        (UpSettings, "octavo/local", ("up",)),
    ],
)
def test_every_setting_is_read_by_its_program(root, cls, folder, variables):
    shared = ("octavo/cli", "octavo/net/security", "octavo/settings")
    files = [path for each in (folder, *shared) for path in (root / each).rglob("*.py")]
    read = names_read((path.read_text() for path in files), variables)
    for name, member in vars(cls).items():
        if isinstance(member, property) and name in read:
            read |= names_read([textwrap.dedent(inspect.getsource(member.fget))], ("self",))
    assert [name for name in options_of(cls) if name not in read] == []
