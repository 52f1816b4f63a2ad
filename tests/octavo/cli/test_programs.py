"""`octavo router` and `octavo worker` become one process of a cluster."""

import os
import sys

import pytest

from octavo.cli import main


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
