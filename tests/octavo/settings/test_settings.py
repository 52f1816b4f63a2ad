"""The settings of the programs, and what --print-config prints."""

import argparse
import ast
import inspect
import textwrap

import pytest

from octavo.settings.loading import from_args
from octavo.settings.options import SettingsError, options_of
from octavo.settings.router import RouterSettings
from octavo.settings.up import UpSettings
from octavo.settings.worker import WorkerSettings


@pytest.mark.parametrize(
    ("table", "variables", "why"),
    [
        ("[worker]\nmodel = 'x'", {}, r"^model \(from .* \[worker\]\): `octavo up` .*; set it in \[up\]$"),
        ("[router]\nlisten = 'a:1'", {}, r"^listen \(from .* \[router\]\): .*; give --host and --grpc-port$"),
        ("", {"OCTAVO_WORKER_STORE": "redis://h"}, r"^store \(from OCTAVO_WORKER_STORE\): .*; set it in \[up\]$"),
        ("", {"OCTAVO_WORKER_ID": "w"}, r"^worker_id \(from OCTAVO_WORKER_ID\): .*; leave it out$"),
    ],
)
def test_what_up_decides_is_set_nowhere_else(config, table, variables, why):
    args = argparse.Namespace(config=str(config(f"[up]\nmodel = 'y'\n{table}\n")))
    with pytest.raises(SettingsError, match=why):
        from_args(UpSettings, args, environ=variables)


def names_read(sources, of):
    """The names of attributes that the sources read of a variable, or of an attribute, that is called one of `of`."""
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return {
        node.attr
        for node in nodes
        if isinstance(node.ctx, ast.Load)
        and (node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")) in of
    }


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
    for name, member in inspect.getmembers(cls, lambda member: isinstance(member, property)):
        if name in read:
            read |= names_read([textwrap.dedent(inspect.getsource(member.fget))], ("self",))
    assert [name for name in options_of(cls) if name not in read] == []
