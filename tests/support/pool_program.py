"""tests/csrc/pool_promises.cpp as a program, with the pool of some sources."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import sanitized

SOURCE = sanitized.ROOT / "tests" / "csrc" / "pool_promises.cpp"
PROMISES = re.findall(r'^    \{"(\w+)", ', SOURCE.read_text(), re.MULTILINE)
BUILDS = {"plain": ["-O1"], "tsan": ["-O1", "-g1", "-fsanitize=thread"]}
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]


def run(command: list[str], promise: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run([*command, promise], capture_output=True, text=True, env=environment)


def made(csrc: Path, folder: Path, how: str) -> list[str]:
    """The command that starts it."""
    if how == "tsan":
        sanitized.library("libtsan.so")
    program = str(folder / f"pool-{how}")
    files = ["-I", str(csrc / "include"), str(csrc / "cpu" / "pool.cpp"), str(SOURCE), "-o", program]
    subprocess.run([sanitized.tool("g++"), "-std=c++17", *BUILDS[how], *WARNINGS, "-pthread", *files], check=True)
    # ThreadSanitizer wants its addresses for itself, which some kernels do not leave to it unless asked.
    asked = [[shutil.which("setarch") or "", "-R", program]] if shutil.which("setarch") else []
    for command in ([program], *asked):
        if run(command, "nothing").returncode == 2:
            return command
    raise sanitized.CannotBuild("programs with ThreadSanitizer do not start here")
