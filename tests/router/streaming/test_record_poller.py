"""When a session reads its record by itself."""

from router.streaming.record_poller import SILENCE_S, RecordPoller


def test_silence_makes_a_poll_due_again_and_again() -> None:
    poller = RecordPoller(10.0)
    assert not poller.update(10.0 + SILENCE_S)
    for round in (1, 2):
        assert poller.update(10.1 + round * SILENCE_S * 1.1)
        poller.note_poll()
        assert not poller.update(10.2 + round * SILENCE_S * 1.1)
    poller.note_item(20.0)
    assert not poller.update(20.0 + SILENCE_S)


def test_no_poll_is_due_while_a_worker_sends() -> None:
    poller = RecordPoller(0.0)
    for tenth in range(1, 1000):
        poller.note_item(tenth / 10)
        assert not poller.update(tenth / 10)


def test_the_earliest_time_asked_for_counts_once() -> None:
    poller = RecordPoller(0.0)
    for at in (0.5, 0.2, 0.9):
        poller.poll_by(at)
    assert not poller.update(0.1)
    assert poller.update(0.2)
    poller.note_poll()
    assert not poller.update(0.95)
