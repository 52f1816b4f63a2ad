"""A deadline passes once for the worker, and then again and again for the router."""

import time

from router.streaming.request_deadline import OVERDUE_S, RequestDeadline


def test_a_worker_gets_more_time_once():
    deadline, now = RequestDeadline(), time.monotonic()
    deadline.set_remaining(5.0)
    assert [deadline.is_past(now + later) for later in (4.9, 5.5)] == [False, True]
    assert deadline.extend_once()
    assert [deadline.is_past(now + later) for later in (5.5, 5.5 + OVERDUE_S)] == [False, True]
    assert not deadline.extend_once()
    deadline = RequestDeadline()
    deadline.set_remaining(0.0)
    deadline.extend_once()
    deadline.set_remaining(-1.0)  # the record does not take back the extension
    assert not deadline.is_past(now + OVERDUE_S / 2)


def test_only_the_first_call_can_end_late():
    deadline, now = RequestDeadline(), time.monotonic()
    assert deadline.lateness(now) < 0
    deadline.set_remaining(-5.0)
    assert deadline.lateness(now) < 0  # this client has attached
    deadline.set_first(1.0)
    assert deadline.lateness(now) < 0
    deadline.extend_once()
    assert 0.4 < deadline.lateness(now + 1.5) <= 0.5
    assert deadline.lateness(now + 3.0) < 0  # its worker hangs
