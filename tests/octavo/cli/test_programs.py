"""`octavo router` and `octavo worker` become one process of a cluster."""

import os
import signal
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.cli import main
from octavo.local import ports

OCTAVO = [sys.executable, "-m", "octavo.cli"]


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


def test_a_router_is_one_process_ended_by_signals(tmp_path):
    (tmp_path / "router.py").write_text("raise SystemExit('the wrong router')")  # of some other project
    (port,) = ports.pick(1)
    command = [
        *OCTAVO,
        "router",
        "--host",
        "0.0.0.0",
        "--insecure",
        "--listen",
        f"127.0.0.1:{port}",
        "--admin-listen",
        "",
    ]
    command += ["--http-listen", "", "--web-listen", "", "--store", "memory://"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as router:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                health = health_pb2_grpc.HealthStub(channel)
                health.Check(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True)
            router.send_signal(signal.SIGTERM)
            _, said = router.communicate(timeout=60)
        finally:
            router.kill()
    assert router.returncode == 0
    (warning,) = [line for line in said.splitlines() if "no TLS" in line]
    assert f"0.0.0.0:{port}: no TLS and no authorization" in warning


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
