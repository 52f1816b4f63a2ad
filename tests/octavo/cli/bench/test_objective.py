"""What `--slo` takes, and which requests keep it."""

import pytest

from octavo.cli.bench.endpoint_base import StreamPart
from octavo.cli.bench.measurement import RequestMeasurement
from octavo.cli.bench.summary import parse_objective


def request(times, ended_at=None, reason=""):
    """A request due at 100 s whose events came at these times after it, a token each."""
    made = RequestMeasurement(0, 100.0, len(times), sent_at=100.0, reason=reason)
    for time in times:
        made.note_part(StreamPart(" a", 1), 100.0 + time)
    made.ended_at = 100.0 + (times[-1] if ended_at is None else ended_at)
    return made


@pytest.mark.parametrize(
    ("limits", "times", "kept"),
    [
        ("ttft=500ms", [0.4, 9.0], True),
        ("ttft=500ms", [0.6, 0.7], False),
        ("itl=50ms", [3.0, 3.04, 3.08], True),
        ("itl=50ms", [0.1, 0.14, 0.24], False),
        ("tpot=50ms", [0.1, 0.11, 0.19], True),
        ("tpot=50ms", [0.1, 0.16, 0.24], False),
        ("e2e=2s", [0.1, 1.9], True),
        ("e2e=2s", [0.1, 2.1], False),
        ("ttft=500ms,itl=50ms", [0.4, 0.5], False),
        ("ttft=500ms, itl=150ms", [0.4, 0.5], True),
        ("itl=1us", [0.4], True),
    ],
)
def test_a_request_keeps_every_limit_or_not(limits, times, kept):
    assert parse_objective(limits).is_kept_by(request(times)) is kept


def test_one_gap_in_two_hundred_may_be_longer():
    times = [0.01 * number for number in range(1, 201)]
    assert parse_objective("itl=20ms").is_kept_by(request([*times, times[-1] + 0.5]))


def test_a_failed_request_keeps_nothing():
    assert not parse_objective("ttft=500ms").is_kept_by(request([0.1], reason="timeout"))
    assert not parse_objective("ttft=500ms").is_kept_by(request([], ended_at=0.1))


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=5", "ttft=ms", "ttft=-5ms", "ttft=0s", "ttft=infs", "ttf=5ms", "ttft=1h"]
)
def test_what_is_no_objective_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="ttft=500ms,itl=50ms"):
        parse_objective(text)
