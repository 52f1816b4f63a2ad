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
from contextlib import suppress
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
    assert main(["top", "--json", "--admin-endpoint", f"127.0.0.1:1,{endpoint}"]) == 0  # another router is watched
    assert json.loads(capsys.readouterr().out)["router_name"] == "router-0"


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
        options = {"env": {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}, "start_new_session": True}
        self.process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, **options)
        os.close(terminal)
        os.set_blocking(self._screen, False)
        self.text = ""

    def _read_until(self, done):
        deadline = time.monotonic() + 60
        while not done() and time.monotonic() < deadline:
            with suppress(OSError):
                self.text += os.read(self._screen, 65536).decode(errors="replace")
            time.sleep(0.02)

    def wait_for(self, text):
        self._read_until(lambda: text in self.text)
        assert text in self.text, self.text[-2000:]

    def end(self, number):
        self.process.send_signal(number)
        self._read_until(lambda: self.process.poll() is not None)
        with suppress(OSError):
            self.text += os.read(self._screen, 65536).decode(errors="replace")
        os.close(self._screen)
        return self.process.wait(1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_live_screen_is_left_without_a_trace(endpoint, router, number):
    """And a lost router is found again."""
    router.num_views = 2
    terminal = Terminal("--interval", "0.2", "--admin-endpoint", endpoint)
    terminal.wait_for("LOST")
    router.num_views = 1_000_000
    terminal.wait_for("up 5 s")
    assert "\x1b[?1049h" in terminal.text  # a screen of its own
    assert "worker-1" in terminal.text
    assert terminal.end(number) == 0
    assert terminal.text.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in terminal.text[-200:]
    assert "Traceback" not in terminal.text


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
