"""The hooks of tests/support/guard, at work on test files that misbehave, in a pytest of their own."""

import re
import signal
import subprocess
import sys
import time

import pytest
from guard.processes import exists

INI = "[pytest]\ntimeout = 60\nkill_after = 0.8\nend_after = {end_after}\naddopts = -p no:cacheprovider -rA\n"
BEGIN = """
import ctypes, os, signal, subprocess, sys, threading, time
from pathlib import Path

import pytest
from guard.processes import lasting

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(300)"]
PIDS = Path(__file__).with_name("pids")

def start(**options):
    process = subprocess.Popen(SLEEP, **options)
    with PIDS.open("a") as file:
        print(process.pid, file=file)
    return process
"""
DEADLOCK = """
@pytest.mark.timeout(1)
def test_inside_a_c_function():
    start()
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.{library}(None).pthread_mutex_lock(mutex)
"""


@pytest.fixture
def written(tmp_path, root, monkeypatch):
    """Writes a test file, and returns the command that runs it under the hooks."""
    monkeypatch.setenv("PYTHONPATH", str(root / "tests" / "support"))

    def write(source, end_after=60, ini=""):
        (tmp_path / "pytest.ini").write_text(INI.format(end_after=end_after) + ini)
        (tmp_path / "conftest.py").write_text('pytest_plugins = ("guard.hooks",)\n')
        (tmp_path / "test_it.py").write_text(BEGIN + source)
        return [sys.executable, "-m", "pytest", str(tmp_path)]

    return write


def started(folder):
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def outcomes(output):
    """By test, the words of pytest's summary."""
    found: dict[str, set[str]] = {}
    for word, name in re.findall(r"^(PASSED|FAILED|ERROR) \S*test_it\.py::test_(\w+)", output, re.MULTILINE):
        found.setdefault(name, set()).add(word)
    return found


MISBEHAVING = """
@pytest.mark.timeout(1)
def test_waits_for_a_child_on_its_way_out():
    with start():
        time.sleep(300)

@pytest.mark.timeout(1)
def test_waits_for_a_thread():
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    thread.start()
    thread.join()

def test_leaves_a_child():
    start()

def test_leaves_a_grandchild_that_has_lost_its_parent():
    code = f"import subprocess; print(subprocess.Popen({SLEEP}, start_new_session=True, stdout=2).pid)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with PIDS.open("a") as file:
        print(done.stdout, file=file)

def test_fails_and_leaves_a_child():
    start()
    assert False

@pytest.fixture(scope="module")
def kept():
    process = start()
    with lasting(lambda: [process.pid]):
        yield process
        process.kill()
        process.wait()

def test_uses_a_child_that_lasts(kept):
    assert kept.poll() is None

def test_uses_it_again(kept):
    assert kept.poll() is None

def test_is_interrupted_as_in_a_terminal():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    code = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_no_process_outlives_its_test_and_every_test_ends(written, tmp_path):
    in_a_script = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]  # what `nohup make test &` is there: SIGINT is ignored
    command = [*in_a_script, *written(MISBEHAVING)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert outcomes(done.stdout) == {
        "waits_for_a_child_on_its_way_out": {"FAILED"},
        "waits_for_a_thread": {"FAILED"},
        "leaves_a_child": {"PASSED", "ERROR"},
        "leaves_a_grandchild_that_has_lost_its_parent": {"PASSED", "ERROR"},
        "fails_and_leaves_a_child": {"FAILED"},
        "uses_a_child_that_lasts": {"PASSED"},
        "uses_it_again": {"PASSED"},
        "is_interrupted_as_in_a_terminal": {"PASSED"},
    }
    assert len(started(tmp_path)) == 5
    assert not [pid for pid in started(tmp_path) if exists(pid)]
    overdue = set(re.findall(r"watchdog: \S*::test_(\w+) is overdue", done.stderr))  # on a busy machine the second, too
    assert overdue <= {"waits_for_a_child_on_its_way_out", "waits_for_a_thread"}, done.stderr
    assert re.search(r"test_waits_for_a_child_on_its_way_out is overdue; killing .*: \d+ \S+python", done.stderr)


@pytest.mark.parametrize("library", ["CDLL", "PyDLL"])  # the second holds the interpreter's lock
def test_a_test_that_nothing_can_end_ends_the_run(written, tmp_path, library):
    command = written(DEADLOCK.replace("{library}", library), end_after=0.5)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    assert "test_inside_a_c_function does not end" in done.stderr
    assert re.search(r'test_it\.py", line \d+ in test_inside_a_c_function', done.stderr), done.stderr
    assert not [pid for pid in started(tmp_path) if exists(pid)]


WAITING = """
@pytest.fixture(scope="session")
def resource():
    yield
    print("torn down")

def test_waits(resource):
    start().wait()
"""


def test_a_run_that_is_told_to_end_ends_in_order(written, tmp_path):
    command = written(WAITING)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        while not (tmp_path / "pids").exists() or not started(tmp_path):
            assert run.poll() is None
            time.sleep(0.01)
        run.terminate()
        assert run.stdout is not None
        output = run.stdout.read()
    assert "ended by SIGTERM" in output and "torn down" in output
    assert run.returncode == 128 + signal.SIGTERM
    assert not [pid for pid in started(tmp_path) if exists(pid)]


INTERRUPTED = """
@pytest.fixture
def broken():
    __tracebackhide__ = lambda excinfo: signal.raise_signal(signal.SIGINT)
    raise RuntimeError

def test_is_interrupted_while_its_failure_is_told(broken):
    pass
"""


def test_ctrl_c_while_pytest_tells_of_a_failure_is_no_internal_error(written):
    strict = "asyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"
    done = subprocess.run(written(INTERRUPTED, ini=strict), capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout + done.stderr
    assert "KeyboardInterrupt" in done.stdout and "INTERNALERROR" not in done.stdout
