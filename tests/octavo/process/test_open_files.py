"""How many connections fit the files that a process may open."""

import resource

import pytest

from octavo.process.open_files import RESERVED, connection_limit

INF = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("now", "wanted", "limit", "changed"),
    [
        ((1024, 4096), 10_000, (4096 - RESERVED) // 2, (4096, 4096)),
        ((1024, 100_000), 1000, 1000, (2000 + RESERVED, 100_000)),
        ((1024, INF), 1000, 1000, (2000 + RESERVED, INF)),
        ((INF, INF), 1000, 1000, None),
        ((256, 256), 1000, 1, None),
    ],
)
def test_connections_leave_files_for_everything_else(monkeypatch, now, wanted, limit, changed):
    limits = [now]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, made: limits.append(made))
    assert connection_limit(wanted) == limit
    assert limits[1:] == ([changed] if changed else [])
