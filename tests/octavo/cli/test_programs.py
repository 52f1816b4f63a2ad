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


@pytest.mark.parametrize("command", ["router", "worker"])
def test_other_machines_are_let_in_with_tls_or_by_a_flag(capsys, monkeypatch, command):
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


@pytest.mark.parametrize(("command", "setting"), [("router", "--max-streams"), ("worker", "--block-size")])
def test_a_wrong_setting_is_told_before_the_program_is_loaded(capsys, monkeypatch, command, setting):
    monkeypatch.setattr(os, "execv", None)
    assert main([command, setting, "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"octavo {command}: {setting[2:].replace('-', '_')} '0'")
    assert main([command, "--no-such"]) == 2


@pytest.mark.parametrize("command", ["router", "worker"])
def test_the_help_has_every_setting(capsys, command):
    assert main([command, "--help"]) == 0
    helped = capsys.readouterr().out
    for flag in ("--host", "--listen", "--store", "--config", "--print-config", "--log-level"):
        assert f"{flag} " in helped or f"{flag}\n" in helped
    assert "--runner" not in helped


def test_a_router_is_one_process_that_warns_and_ends_by_signal(tmp_path):
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


INTERRUPTED_WHILE_LOADING = """
import os, runpy, signal, sys

class Interruption:
    def find_spec(self, name, *_):
        if name == "octavo.settings":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interruption())
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize(("module", "status"), [("router", -2), ("gpu_worker", -2), ("octavo.cli", 130)])
def test_ctrl_c_while_modules_are_loaded_leaves_no_traceback(module, status):
    command = [sys.executable, "-c", INTERRUPTED_WHILE_LOADING, module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (status, "")
