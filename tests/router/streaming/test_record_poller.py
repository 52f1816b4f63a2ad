"""When a session looks at the record by itself."""

from router.streaming.record_poller import SILENCE_S, RecordPoller


def test_silence_is_looked_into_again_and_again() -> None:
    poller = RecordPoller(10.0, attend_s=100.0)
    assert not poller.tick(10.0 + SILENCE_S)
    for round in (1, 2):
        assert poller.tick(10.1 + round * SILENCE_S * 1.1)
        poller.looked()
        assert not poller.tick(10.2 + round * SILENCE_S * 1.1)
    poller.heard(20.0)
    assert not poller.tick(20.0 + SILENCE_S)


def test_the_store_is_told_in_time_however_much_the_worker_sends() -> None:
    poller = RecordPoller(0.0, attend_s=2.0)
    for tenth in range(1, 21):
        poller.heard(tenth / 10)
        assert not poller.tick(tenth / 10)
    poller.heard(2.05)
    assert poller.tick(2.1)
    poller.looked()
    poller.attended(2.1)
    assert not poller.tick(2.2)


def test_the_earliest_time_asked_for_counts_once() -> None:
    poller = RecordPoller(0.0, attend_s=100.0)
    for at in (0.5, 0.2, 0.9):
        poller.look_by(at)
    assert not poller.tick(0.1)
    assert poller.tick(0.2)
    poller.looked()
    assert not poller.tick(0.95)


def test_a_deadline_wakes_without_a_look() -> None:
    poller = RecordPoller(0.0, attend_s=100.0)
    poller.deadline = 0.5
    assert not poller.tick(0.4)
    assert poller.tick(0.5)
    assert not poller.look
