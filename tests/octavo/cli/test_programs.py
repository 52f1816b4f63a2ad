"""`octavo router` and `octavo worker` become one process of a cluster."""

import os
import re
import sys

import pytest

from octavo.cli import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["router", "--host", "0.0.0.0"], r"0\.0\.0\.0:500.*give --tls-cert, --tls-key and --tls-ca, or --insecure"),
        (["worker", "--host", "0.0.0.0"], r"0\.0\.0\.0:500.*give --tls-cert, --tls-key and --tls-ca, or --insecure"),
        (["router", "--tls-cert", "a.crt", "--tls-key", "a.key"], "belong together"),
        (["worker", "--tls-cert", "a.crt", "--tls-key", "a.key"], "belong together"),
        (["router", "--no-client-certificates"], "--no-client-certificates needs --api-keys"),
    ],
)
def test_what_would_be_open_to_others_is_refused_in_one_line(capsys, monkeypatch, words, says):
    monkeypatch.setattr(os, "execv", None)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(says, line)


@pytest.mark.parametrize(("command", "module"), [("router", "router"), ("worker", "gpu_worker")])
def test_the_command_becomes_the_program_with_its_arguments(monkeypatch, command, module):
    became = []

    def execv(path, command):
        became.append((path, command))
        raise SystemExit  # the real one does not return either

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit):
        main([command, "--host", "0.0.0.0", "--insecure"])
    assert became == [(sys.executable, [sys.executable, "-P", "-m", module, "--host", "0.0.0.0", "--insecure"])]
