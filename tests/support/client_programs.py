"""The programs of tests/clients/packages, each with the packages it needs in a folder of its own below `build/`."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "clients" / "packages"
INSTALLED = ROOT / "build" / "clients"
INSTALL_S, ROUND_S = 1800.0, 1200.0
# Nothing but the router is asked, and no package writes beside its program.
ALONE = {
    "NO_PROXY": "127.0.0.1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "AI_SDK_LOG_WARNINGS": "false",
}


@dataclass(frozen=True, slots=True)
class Program:
    """`use_NAME.py`, or `use_NAME.mjs`, and its row in packages.toml."""

    name: str
    pip: tuple[str, ...] = ()
    repeats: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Another one when what is to be installed changes."""
        lock = "\n".join((sys.version, *self.pip)) if self.pip else (PROGRAMS / "package-lock.json").read_text()
        kind = self.name if self.pip else "node"
        return INSTALLED / f"{kind}-{hashlib.sha256(lock.encode()).hexdigest()[:12]}"

    def install(self) -> None:
        """Does nothing where it was done before."""
        done = self.folder / "installed"
        if done.exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.pip:
            _run([sys.executable, "-m", "venv", self.folder])
            _run([self.folder / "bin/pip", "install", "--quiet", "--no-compile", *self.pip])
        else:
            self.folder.mkdir(parents=True)
            for name in ("package.json", "package-lock.json"):
                shutil.copy(PROGRAMS / name, self.folder)
            _run(["npm", "ci", "--no-audit", "--no-fund", "--loglevel", "error"], self.folder)
        done.touch()

    def command(self) -> list[str]:
        if self.pip:
            return [str(self.folder / "bin/python"), str(PROGRAMS / f"use_{self.name}.py")]
        for file in PROGRAMS.glob("*.mjs"):  # node looks for packages beside a module
            shutil.copy(file, self.folder)
        return ["node", str(self.folder / f"use_{self.name}.mjs")]

    @contextmanager
    def running(self, router: str, model: str, cases: Sequence[str] = ()) -> Iterator["Rounds"]:
        """`router` is an address such as http://127.0.0.1:58051; without `cases` all are done."""
        process = subprocess.Popen(
            [*self.command(), router, model, *cases],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ALONE},
        )
        with process:
            try:
                yield Rounds(process)
            finally:
                process.kill()


class Rounds:
    """What a running program says, round after round."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        """The value of each case of another round. A case that failed is an AssertionError."""
        found: dict[str, Any] = {}
        asks, tells = self._process.stdin, self._process.stdout
        assert asks is not None and tells is not None
        limit = threading.Timer(ROUND_S, self._process.kill)
        limit.start()
        try:
            print(file=asks, flush=True)
            for line in tells:
                if line == "{}\n":
                    return found
                if not line.startswith('{"case":'):  # packages print, too
                    continue
                said = json.loads(line)
                assert "error" not in said, f"{said['case']}: {said['error']}"
                found[said["case"]] = said["value"]
            raise AssertionError(f"the program ended after {list(found)}")
        finally:
            limit.cancel()


def programs() -> list[Program]:
    """Those that OCTAVO_TEST_PACKAGES names; or all of packages.toml, unless languages are chosen."""
    table = tomllib.loads((PROGRAMS / "packages.toml").read_text())
    chosen = os.environ.get("OCTAVO_TEST_PACKAGES", "").split()
    if not chosen and not os.environ.get("OCTAVO_TEST_CLIENTS"):
        chosen = list(table)
    return [Program(name, *(tuple(table[name].get(key, ())) for key in ("pip", "repeats"))) for name in chosen]


def _run(command: Sequence[str | Path], folder: Path | None = None) -> None:
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_S
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
