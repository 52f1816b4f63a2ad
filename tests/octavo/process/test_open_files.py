"""How many connections fit the files that a process may open."""

import resource

import pytest

from octavo.process import open_files
from octavo.process.open_files import RESERVED, connection_limit


@pytest.fixture
def files(monkeypatch):
    """A process whose limits are those that the test sets; what it sets is in `set`."""

    class Limits:
        now = (1024, 4096)
        set: tuple[int, int] | None = None

    def change(_, limits):
        Limits.now = Limits.set = limits

    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: Limits.now)
    monkeypatch.setattr(open_files.resource, "setrlimit", change)
    return Limits


@pytest.mark.parametrize(
    ("now", "wanted", "limit", "changed"),
    [
        ((1024, 4096), 10_000, (4096 - RESERVED) // 2, (4096, 4096)),
        ((1024, 100_000), 1000, 1000, (2000 + RESERVED, 100_000)),
        ((100_000, 100_000), 1000, 1000, None),
        ((1024, resource.RLIM_INFINITY), 1000, 1000, (2000 + RESERVED, resource.RLIM_INFINITY)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1000, 1000, None),
        ((256, 256), 1000, 1, None),
    ],
)
def test_connections_leave_files_for_everything_else(files, now, wanted, limit, changed):
    files.now, files.set = now, None
    assert connection_limit(wanted) == limit
    assert files.set == changed
