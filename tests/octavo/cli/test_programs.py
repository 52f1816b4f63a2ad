"""`octavo router` and `octavo worker` become one process of a cluster."""

import os
import sys

import pytest

from octavo.cli import main


@pytest.mark.parametrize("command", ["router", "worker"])
def test_other_machines_need_tls_or_a_flag(capsys, monkeypatch, command):
    monkeypatch.setattr(os, "execv", None)
    assert main([command, "--host", "0.0.0.0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "0.0.0.0:500" in line and "give --tls-cert, --tls-key and --tls-ca, or --insecure" in line
    assert main([command, "--tls-cert", "a.crt", "--tls-key", "a.key"]) == 2
    assert "belong together" in capsys.readouterr().err


def test_clients_without_certificates_need_keys(capsys, monkeypatch):
    monkeypatch.setattr(os, "execv", None)
    assert main(["router", "--no-client-certificates"]) == 2
    assert "--no-client-certificates needs --api-keys" in capsys.readouterr().err


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
