import logging

import pytest

from octavo.process import retry
from octavo.process.retry import until_answered
from octavo.request.errors import NotFound, StoreUnavailable


class FailingCall:
    """Raises StoreUnavailable `num_failures` times, and then returns how often it was called."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.num_calls = 0

    async def __call__(self) -> int:
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise StoreUnavailable(f"failure {self.num_calls}")
        return self.num_calls


async def test_an_answer_is_returned_at_once():
    call = FailingCall(0)
    assert await until_answered(call, pause_s=3600.0) == 1


async def test_a_call_is_repeated_until_the_store_answers():
    assert await until_answered(FailingCall(5), pause_s=0.0) == 6


async def test_patience_that_is_over_raises_the_last_failure():
    call = FailingCall(1_000_000)
    with pytest.raises(StoreUnavailable) as raised:
        await until_answered(call, patience_s=0.05, pause_s=0.01)
    assert call.num_calls > 1
    assert raised.value.message == f"failure {call.num_calls}"


async def test_no_patience_is_one_attempt():
    call = FailingCall(1)
    with pytest.raises(StoreUnavailable):
        await until_answered(call, patience_s=0.0, pause_s=3600.0)
    assert call.num_calls == 1


async def test_another_error_is_not_repeated():
    num_calls = 0

    async def fail() -> None:
        nonlocal num_calls
        num_calls += 1
        raise NotFound("no such record")

    with pytest.raises(NotFound):
        await until_answered(fail, pause_s=0.0)
    assert num_calls == 1


@pytest.mark.parametrize(("interval_s", "num_warnings"), [(3600.0, 1), (0.0, 4)])
async def test_warnings_name_the_call_and_keep_their_interval(monkeypatch, caplog, interval_s, num_warnings):
    monkeypatch.setattr(retry, "WARNING_INTERVAL_S", interval_s)
    with caplog.at_level(logging.WARNING, logger="octavo.process.retry"):
        await until_answered(FailingCall(4), pause_s=0.001, what="finish of a sequence")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == num_warnings
    assert messages[0] == "finish of a sequence: waiting for the store: failure 1"
