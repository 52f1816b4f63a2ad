"""Classic bugs in the CPU ops, which the tests of this folder must see in the module that ships, without sanitizers."""

import os
import re
import subprocess
import sys
from pathlib import Path

from mutant import ROOT, Build, Suite, read

TESTS = Path(__file__).resolve().parents[1]


def first_failure(folder: Path, tests: str) -> str | None:
    file, *options = tests.split(" ")
    quiet = ["-q", "-x", "-p", "no:cacheprovider", "--tb=no"]
    command = [sys.executable, "-m", "pytest", "--every", *quiet, TESTS / file, *options]
    environment = os.environ | {"OCTAVO_TEST_EXTENSION": str(folder), "CI": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode == 0:
        return None
    failed = re.search(r"^FAILED \S+?::(\S+)", done.stdout, re.MULTILINE)
    return f"{file}: {failed[1] if failed else f'ended with {done.returncode}'}"


BUILT = ROOT / "build" / f"csrc-{sys.implementation.cache_tag}"
CPU = Suite(read("cpu"), lambda: Build(BUILT, "_C_cpu"), first_failure)
