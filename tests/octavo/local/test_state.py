import fcntl
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


def test_a_state_is_read_back_while_its_owner_runs(tmp_path, example):
    with state.locked(tmp_path):
        state.write(tmp_path, example)
        assert state.read(tmp_path) == example
        assert json.loads((tmp_path / state.FILE).read_text())["endpoints"] == ["127.0.0.1:1"]
        assert list(tmp_path.glob("*.json*")) == [tmp_path / state.FILE]
    assert state.read(tmp_path) is None  # what is left behind by a killed owner counts for nothing


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense"])
def test_a_file_that_is_no_state_is_none(tmp_path, text):
    assert state.read(tmp_path / "nowhere") is None
    with state.locked(tmp_path):
        assert state.read(tmp_path) is None
        (tmp_path / state.FILE).write_text(text)
        assert state.read(tmp_path) is None


def test_what_a_killed_owner_left_is_gone_when_the_next_one_begins(tmp_path, example):
    with state.locked(tmp_path):
        state.write(tmp_path, example)
    with state.locked(tmp_path):
        assert state.read(tmp_path) is None


def test_a_reader_does_not_keep_an_owner_out(tmp_path):
    (tmp_path / state.LOCK).touch()
    reader = (tmp_path / state.LOCK).open("r+")
    fcntl.flock(reader, fcntl.LOCK_SH)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        reader.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state.time, "sleep", sleep)
        with state.locked(tmp_path):
            assert len(waits) == 1


def test_a_directory_has_one_owner(tmp_path):
    code = f"""
from pathlib import Path
from octavo.local import state
try:
    with state.locked(Path({str(tmp_path)!r})):
        print("locked")
except state.AlreadyRunningError as error:
    print(error)
"""

    def other_process():
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    with state.locked(tmp_path):
        assert "--state-dir" in other_process()
    assert other_process() == "locked\n"


def test_a_port_in_use_is_named_with_the_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ports.PortInUseError, match=rf"port {port} .* --grpc-port"):
            ports.require_free("127.0.0.1", port, "--grpc-port")
    ports.require_free("127.0.0.1", port, "--grpc-port")


@pytest.mark.parametrize("host", ["nowhere.invalid", "203.0.113.1"])
def test_a_host_of_another_machine_is_not_called_a_port_in_use(host):
    with pytest.raises(CommandError, match=f"^--host {host} is no address of this machine: give one, or 0.0.0.0"):
        ports.require_free(host, 50051, "--grpc-port")


PICKS = "import sys; from octavo.local import ports; print(*ports.pick(30), flush=True); sys.stdin.read()"


def test_processes_at_the_same_moment_pick_different_ports():
    pickers = [
        subprocess.Popen([sys.executable, "-c", PICKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    picked = [int(port) for picker in pickers for port in picker.stdout.readline().split()]
    for picker in pickers:
        picker.communicate()
    assert len(set(picked)) == len(picked) == 6 * 30


@pytest.mark.parametrize("text", ["25000\t60999\n", "1024 24999"])
def test_no_port_is_picked_that_the_machine_gives_to_clients(text, tmp_path, monkeypatch):
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    first, last = map(int, text.split())
    with closing(ports.PortPool()) as pool:
        picked = list(islice(pool.in_turn(), 2000))
    assert len(set(picked)) == 2000
    assert all(port in ports.RANGE and not first <= port <= last for port in picked)


def test_a_port_comes_again_only_after_the_others():
    with closing(ports.PortPool()) as pool:
        first = set(islice(pool.in_turn(), 100))
        assert not first & set(islice(pool.in_turn(), 100))


def test_picked_ports_are_free_different_and_not_given_to_clients():
    picked = ports.pick(20)
    assert len(set(picked)) == 20
    assert all(port in ports.RANGE and ports.is_free("127.0.0.1", port) for port in picked)
