"""When a session reads its record by itself."""

from router.streaming.record_poller import SILENCE_S, RecordPoller


def test_silence_makes_a_poll_due_again_and_again() -> None:
    poller = RecordPoller(10.0, attachment_interval_s=100.0)
    assert not poller.update(10.0 + SILENCE_S)
    for round in (1, 2):
        assert poller.update(10.1 + round * SILENCE_S * 1.1)
        poller.note_poll()
        assert not poller.update(10.2 + round * SILENCE_S * 1.1)
    poller.note_item(20.0)
    assert not poller.update(20.0 + SILENCE_S)


def test_the_store_is_told_in_time_however_much_the_worker_sends() -> None:
    poller = RecordPoller(0.0, attachment_interval_s=2.0)
    for tenth in range(1, 21):
        poller.note_item(tenth / 10)
        assert not poller.update(tenth / 10)
    poller.note_item(2.05)
    assert poller.update(2.1)
    poller.note_poll()
    poller.note_attached(2.1)
    assert not poller.update(2.2)


def test_the_earliest_time_asked_for_counts_once() -> None:
    poller = RecordPoller(0.0, attachment_interval_s=100.0)
    for at in (0.5, 0.2, 0.9):
        poller.poll_by(at)
    assert not poller.update(0.1)
    assert poller.update(0.2)
    poller.note_poll()
    assert not poller.update(0.95)
