"""When a session looks at the record by itself."""

from router.streaming.record_poller import SILENCE_S, Lookout


def test_silence_is_looked_into_again_and_again() -> None:
    lookout = Lookout(10.0, attend_s=100.0)
    assert not lookout.tick(10.0 + SILENCE_S)
    for round in (1, 2):
        assert lookout.tick(10.1 + round * SILENCE_S * 1.1)
        lookout.looked()
        assert not lookout.tick(10.2 + round * SILENCE_S * 1.1)
    lookout.heard(20.0)
    assert not lookout.tick(20.0 + SILENCE_S)


def test_the_store_is_told_in_time_however_much_the_worker_sends() -> None:
    lookout = Lookout(0.0, attend_s=2.0)
    for tenth in range(1, 21):
        lookout.heard(tenth / 10)
        assert not lookout.tick(tenth / 10)
    lookout.heard(2.05)
    assert lookout.tick(2.1)
    lookout.looked()
    lookout.attended(2.1)
    assert not lookout.tick(2.2)


def test_the_earliest_time_asked_for_counts_once() -> None:
    lookout = Lookout(0.0, attend_s=100.0)
    for at in (0.5, 0.2, 0.9):
        lookout.look_by(at)
    assert not lookout.tick(0.1)
    assert lookout.tick(0.2)
    lookout.looked()
    assert not lookout.tick(0.95)


def test_a_deadline_wakes_without_a_look() -> None:
    lookout = Lookout(0.0, attend_s=100.0)
    lookout.deadline = 0.5
    assert not lookout.tick(0.4)
    assert lookout.tick(0.5)
    assert not lookout.look
