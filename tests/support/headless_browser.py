"""A headless Chromium, driven by Node: see tests/page/browser/drive.mjs."""

import json
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "page" / "browser"
INSTALL = ROOT / "tools" / "browser.sh"
NOT_PERMITTED = 77  # see tools/browser.sh
ANSWER_S = 60.0


class BrowserMissing(Exception):
    """There is no browser, and this user may not install one. The message says what root would run."""


class HeadlessBrowser:
    """One browser with one page. Installs what is missing, into `folder` or by Debian's packages."""

    def __init__(self, folder: Path) -> None:
        found = subprocess.run([INSTALL], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=600)
        last = (found.stdout.strip().splitlines() or [""])[-1]
        if found.returncode == NOT_PERMITTED:
            raise BrowserMissing(last)
        found.check_returncode()
        program = folder / "browser"
        shutil.copytree(PROGRAM, program)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--loglevel", "error"]
        done = subprocess.run(
            command, cwd=program, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise AssertionError(done.stderr)
        self._process = subprocess.Popen(
            ["node", "drive.mjs", last], cwd=program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str, **given: Any) -> Any:
        """The answer to one command. Raises AssertionError if it fails or does not answer."""
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("no pipes")
        self._process.stdin.write(json.dumps({"command": command, **given}) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise AssertionError(f"{command}: the browser has not answered")
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{command}: {answer['error']}")
        return answer["value"]

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self.ask("evaluate", script=script)

    def close(self) -> None:
        with self._process:  # closes the pipes, upon which the program ends
            pass
