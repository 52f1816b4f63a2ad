"""The promises of the thread pool (pool_promises.cpp), in a program of its own: plain, and under ThreadSanitizer."""

from pathlib import Path

import pool_program
import pytest
import sanitized


@pytest.fixture(scope="module", params=pool_program.BUILDS)
def command(request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    try:
        return pool_program.made(root / "csrc", tmp_path_factory.mktemp("pool"), request.param)
    except sanitized.CannotBuild as error:
        pytest.skip(f"cannot build it: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("promise", pool_program.PROMISES)
def test_the_pool_keeps_its_promises(command: list[str], promise: str) -> None:
    if promise == "forks_have_their_own" and command[-1].endswith("tsan"):
        pytest.skip("ThreadSanitizer knows no threads in forked processes")
    done = pool_program.run(command, promise)
    assert done.returncode == 0, done.stderr[-4000:]
