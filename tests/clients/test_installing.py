"""tools/clients.sh installs what is missing, or says why it does not; no language is left out without a word."""

import os
import subprocess

import pytest
from example import EXAMPLES

SCRIPT = EXAMPLES.parent / "tools" / "clients.sh"
MAKEFILE = """
tools:
\t@test -e installed
packages:
\t@echo cobol-compiler libcobol-dev
build:
\t@touch built
"""


@pytest.fixture
def cobol(tmp_path):
    """A repository with one example, which nothing is installed for, and programs that stand in for the system's."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "clients.sh").write_text(SCRIPT.read_text())
    folder = tmp_path / "examples" / "cobol"
    folder.mkdir(parents=True)
    (folder / "Makefile").write_text(MAKEFILE)
    (tmp_path / "bin").mkdir()
    return folder


def run(folder, **programs):
    root = folder.parents[1]
    for name, script in programs.items():
        program = root / "bin" / name.replace("_", "-")
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{root / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", root / "tools" / "clients.sh", "cobol"]
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def test_who_may_not_install_is_told_what_root_would_run(cobol):
    done = run(cobol, id="echo 1000", sudo="exit 1", apt_get="exit 1")
    assert done.returncode == 77
    last = done.stdout.splitlines()[-1]
    assert last == (
        "cobol needs cobol-compiler libcobol-dev: "
        "ask root to run: apt-get install --no-install-recommends cobol-compiler libcobol-dev"
    )
    assert not (cobol / "built").exists()


def test_root_installs_and_builds(cobol):
    done = run(cobol, id="echo 0", apt_get=f'echo "$@" >> {cobol}/calls; touch {cobol}/installed')
    assert done.returncode == 0, done.stderr
    calls = (cobol / "calls").read_text().splitlines()
    assert calls[0].endswith("update")
    assert calls[1].endswith("install --yes --no-install-recommends cobol-compiler libcobol-dev")
    assert (cobol / "built").exists()


def test_nothing_is_installed_that_is_there(cobol):
    (cobol / "installed").touch()
    done = run(cobol, id="echo 1000", apt_get=f"touch {cobol}/calls")
    assert done.returncode == 0, done.stderr
    assert (cobol / "built").exists()
    assert not (cobol / "calls").exists()


def test_a_failed_installation_is_an_error(cobol):
    """A skip would hide that the mirror is down."""
    done = run(cobol, id="echo 0", apt_get="exit 100")
    assert done.returncode not in (0, 77)
