"""`octavo show` joins what several routers say of one request."""

from types import SimpleNamespace

from octavo.cli.operators.show import joined_entries
from octavo.client import RequestEntry


def status(*entries):
    return SimpleNamespace(timeline=tuple(RequestEntry(after_ms, what, "") for after_ms, what in entries))


def test_the_end_is_last_within_one_millisecond():
    found = [status((0, "queued"), (1, "ended")), status((0, "queued"), (1, "first_token"), (1, "ended"))]
    assert [entry.what for entry in joined_entries(found)] == ["queued", "first_token", "ended"]
