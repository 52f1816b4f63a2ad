"""A deadline passes once for the worker, and then again and again for the router."""

import time

from router.streaming.request_deadline import OVERDUE_S, RequestDeadline


def test_without_a_deadline_no_time_is_past() -> None:
    assert not RequestDeadline().is_past(time.monotonic() + 1e9)


def test_a_worker_gets_more_time_once() -> None:
    deadline, now = RequestDeadline(), time.monotonic()
    deadline.set_remaining(5.0)
    assert not deadline.is_past(now + 4.9)
    assert deadline.is_past(now + 5.5)
    assert deadline.extend_once()
    assert not deadline.is_past(now + 5.5)
    assert deadline.is_past(now + 5.5 + OVERDUE_S)
    assert not deadline.extend_once()


def test_the_record_does_not_take_back_the_extension() -> None:
    deadline, now = RequestDeadline(), time.monotonic()
    deadline.set_remaining(0.0)
    deadline.extend_once()
    deadline.set_remaining(-1.0)
    assert not deadline.is_past(now + OVERDUE_S / 2)


def test_after_a_failed_end_the_deadline_passes_again() -> None:
    deadline, now = RequestDeadline(), time.monotonic()
    deadline.set_remaining(-3.0)
    assert deadline.is_past(time.monotonic())
    deadline.postpone()
    assert not deadline.is_past(now + OVERDUE_S / 2)
    assert deadline.is_past(time.monotonic() + OVERDUE_S)
