"""A deadline passes once for the worker, and then again and again for the router."""

import time

import pytest

from router.streaming.request_deadline import MAX_MARGIN_S, OVERDUE_S, DeadlineMargin, RequestDeadline


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


def test_only_the_end_of_the_first_client_s_call_can_be_late() -> None:
    deadline, now = RequestDeadline(), time.monotonic()
    assert deadline.lateness(now) < 0
    deadline.set_remaining(-5.0)
    assert deadline.lateness(now) < 0  # this client has attached
    deadline.set_first(1.0)
    assert deadline.lateness(now) < 0
    deadline.extend_once()
    assert 0.4 < deadline.lateness(now + 1.5) <= 0.5
    assert deadline.lateness(now + 3.0) < 0  # its worker hangs


def test_the_margin_follows_what_was_late() -> None:
    margin = DeadlineMargin()
    assert margin.margin_s(20.0, now=0.0) == 0.1
    assert margin.margin_s(0.5, now=0.0) == 0.05
    margin.note_lateness(0.2, now=0.0)
    margin.note_lateness(0.1, now=0.0)  # the latest of all counts
    assert margin.margin_s(20.0, now=0.0) == pytest.approx(0.4)
    assert margin.margin_s(0.5, now=0.0) == 0.25  # half of the time is the client's
    assert margin.margin_s(20.0, now=30.0) == pytest.approx(0.25)
    assert margin.margin_s(20.0, now=1e6) == pytest.approx(0.1)
    margin.note_lateness(60.0, now=1e6)
    assert margin.margin_s(20.0, now=1e6) == MAX_MARGIN_S
