import json
import socket
import subprocess
import sys
from contextlib import closing
from itertools import islice

import pytest

from octavo.local import ports, state
from octavo.local.state import ClusterState, RouterState, StoreState, WorkerState
from octavo.process.command_error import CommandError


@pytest.fixture
def example(tmp_path):
    return ClusterState(
        pid=1,
        model="m",
        state_dir=str(tmp_path),
        store=StoreState("unix:///s", 2, True),
        routers=[RouterState("router-0", 3, "127.0.0.1:1", "127.0.0.1:2")],
        workers=[WorkerState("worker-0", None, "127.0.0.1:3")],
        ready=True,
    )


def test_a_state_is_read_while_its_owner_runs(tmp_path, example):
    assert state.read(tmp_path / "nowhere") is None
    with state.locked(tmp_path):
        assert state.read(tmp_path) is None
        for text in ("", "[]", "{}", "nonsense"):
            (tmp_path / state.FILE).write_text(text)
            assert state.read(tmp_path) is None
        state.write(tmp_path, example)
        assert state.read(tmp_path) == example
        assert json.loads((tmp_path / state.FILE).read_text())["endpoints"] == ["127.0.0.1:1"]
        assert list(tmp_path.glob("*.json*")) == [tmp_path / state.FILE]
    assert state.read(tmp_path) is None  # what is left behind by a killed owner counts for nothing


OWN = """
import sys
from pathlib import Path
from octavo.local import state
try:
    with state.locked(Path(sys.argv[1])):
        print("locked")
except state.AlreadyRunningError as error:
    print(error)
"""


def test_a_directory_has_one_owner(tmp_path):
    def other_process():
        command = [sys.executable, "-c", OWN, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with state.locked(tmp_path):
        assert "--state-dir" in other_process()
    assert other_process() == "locked\n"


def test_a_used_port_is_named_with_its_remedy():
    """A foreign host is no used port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ports.PortInUseError, match=rf"port {port} .* --grpc-port"):
            ports.require_free("127.0.0.1", port, "--grpc-port")
    ports.require_free("127.0.0.1", port, "--grpc-port")
    for host in ("nowhere.invalid", "203.0.113.1"):
        with pytest.raises(CommandError, match=f"^--host {host} is no address of this machine: give one, or 0.0.0.0"):
            ports.require_free(host, 50051, "--grpc-port")


@pytest.mark.parametrize("text", ["25000\t60999\n", "1024 24999"])
def test_ports_of_clients_are_not_picked(text, tmp_path, monkeypatch):
    """And of two that pick at the same time, each gets other ones: a claim is of whoever binds it first."""
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    monkeypatch.setattr(ports.random, "shuffle", lambda blocks: None)  # both want the same
    first, last = map(int, text.split())
    with closing(ports.PortPool()) as one, closing(ports.PortPool()) as other:
        picked = [*islice(other.in_turn(), 100), *islice(other.in_turn(), 100), *islice(one.in_turn(), 2000)]
    assert len(set(picked)) == 2200
    assert all(port in ports.RANGE and not first <= port <= last for port in picked)
