"""How the programs of this environment are found and started."""

import shutil
import sys
from pathlib import Path


def find_program(name: str) -> str:
    """The path of a program: of this environment, or else of the PATH. Empty if there is none."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or ""


def program_command(module: str, arguments: list[str]) -> list[str]:
    """The command line of a program. -P: a `router.py` in the working directory is not taken for the router."""
    return [sys.executable, "-P", "-m", module, *arguments]
