"""`octavo show` joins what several routers say of one request."""

from types import SimpleNamespace

from octavo.cli.show import joined_entries
from octavo.client import RequestEntry


def status(*entries: tuple[int, str]) -> SimpleNamespace:
    return SimpleNamespace(timeline=tuple(RequestEntry(after_ms, what, "") for after_ms, what in entries))


def test_the_record_counts_once_and_what_each_router_saw_is_added() -> None:
    record = ((0, "queued"), (3, "taken"), (90, "ended"))
    found = [
        status(record[0], record[1], (50, "attached"), record[2]),
        status(*record),
        status(record[0], record[1], (4, "prefill"), (9, "first_token"), record[2]),
    ]
    joined = [(entry.after_ms, entry.what) for entry in joined_entries(found)]
    assert joined == [(0, "queued"), (3, "taken"), (4, "prefill"), (9, "first_token"), (50, "attached"), (90, "ended")]


def test_the_end_is_last_among_what_happened_in_one_millisecond() -> None:
    found = [status((0, "queued"), (1, "ended")), status((0, "queued"), (1, "first_token"), (1, "ended"))]
    assert [entry.what for entry in joined_entries(found)] == ["queued", "first_token", "ended"]
