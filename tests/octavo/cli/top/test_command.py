"""`octavo top`: one frame, one view, a live screen that is left by Ctrl-C; what is wrong is told in the last line."""

import builtins
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

import pytest

from octavo.cli import main
from octavo.cli.top import command


def test_one_frame(endpoint, capsys):
    assert main(["top", "--once", "--interval", "0.2", "--admin-endpoint", endpoint]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("octavo top  router-0  up 2 s  live\n")
    assert "200 tokens/s" in told.out
    assert not told.err


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["127.0.0.1:1", "--timeout=0.5"], "127.0.0.1:1: no answer within 0.5 s", 1),
        (["nowhere"], "--admin-endpoint", 2),
    ],
)
def test_the_last_line_says_what_is_wrong(capsys, words, says, code):
    assert main(["top", "--json", "--admin-endpoint", *words]) == code
    told = capsys.readouterr()
    assert says in told.err.splitlines()[-1]
    assert not told.out


class Terminal:
    """`octavo top` on a terminal of 80 × 24."""

    def __init__(self, *words):
        self._screen, terminal = pty.openpty()
        ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        command = [sys.executable, "-m", "octavo.cli", "top", *words]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
        )
        os.close(terminal)
        os.set_blocking(self._screen, False)
        self.text = ""

    def wait_for(self, text, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while text not in self.text and time.monotonic() < deadline:
            self._read()
            time.sleep(0.02)
        assert text in self.text, self.text[-2000:]

    def _read(self):
        try:
            self.text += os.read(self._screen, 65536).decode(errors="replace")
        except (BlockingIOError, OSError):
            pass

    def end(self, number):
        self.process.send_signal(number)
        deadline = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read()
            time.sleep(0.02)
        self._read()
        os.close(self._screen)
        return self.process.wait(1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_live_screen_is_left_without_a_trace(endpoint, number):
    terminal = Terminal("--interval", "0.2", "--admin-endpoint", endpoint)
    terminal.wait_for("up 3 s")
    assert "\x1b[?1049h" in terminal.text  # a screen of its own
    assert "worker-1" in terminal.text
    assert terminal.end(number) == 0
    assert terminal.text.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in terminal.text[-200:]
    assert "Traceback" not in terminal.text


def test_a_lost_router_is_found_again(endpoint, router):
    router.num_views = 2
    terminal = Terminal("--interval", "0.2", "--admin-endpoint", endpoint)
    terminal.wait_for("LOST")
    router.num_views = 1_000_000
    terminal.wait_for("up 5 s")
    assert terminal.end(signal.SIGINT) == 0


def test_json_needs_no_rich(endpoint, capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    real = builtins.__import__

    def without_rich(name, *rest):
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    assert main(["top", "--json", "--admin-endpoint", endpoint]) == 0
    assert main(["top", "--once", "--admin-endpoint", endpoint]) == 1
    assert "pip install 'octavo[top]'" in capsys.readouterr().err


def test_another_router_is_watched_after_silence(endpoint, capsys):
    assert main(["top", "--json", "--admin-endpoint", f"127.0.0.1:1,{endpoint}"]) == 0
    assert json.loads(capsys.readouterr().out)["router_name"] == "router-0"
