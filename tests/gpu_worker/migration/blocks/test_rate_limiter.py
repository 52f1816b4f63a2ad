"""How many bytes a limiter lets through."""

import threading
import time

from migration_peers import wait_until

from gpu_worker.migration.blocks.rate_limiter import RateLimiter


def never() -> bool:
    return False


def test_bytes_pass_at_the_rate() -> None:
    """Time is only bounded from below: a busy machine is slower than the rate, never faster."""
    limiter = RateLimiter(1_000_000)
    began = time.monotonic()
    for _ in range(30):
        assert limiter.pass_bytes(10_000, never)
    assert time.monotonic() - began >= 0.2  # 300 kB, less the last part and the burst


def test_a_rate_may_change_while_somebody_waits() -> None:
    limiter = RateLimiter(0)
    passed = threading.Event()
    thread = threading.Thread(target=lambda: limiter.pass_bytes(1000, never) and passed.set(), daemon=True)
    thread.start()
    assert not passed.wait(0.3)
    limiter.bytes_per_s = None
    assert limiter.bytes_per_s is None
    assert passed.wait(60)
    thread.join()


def test_who_is_stopped_does_not_pass() -> None:
    limiter = RateLimiter(0)
    stop, results = threading.Event(), []
    thread = threading.Thread(target=lambda: results.append(limiter.pass_bytes(1, stop.is_set)), daemon=True)
    thread.start()
    stop.set()
    wait_until(lambda: results)
    assert results == [False]
    thread.join()


def test_those_who_share_a_limiter_share_its_rate() -> None:
    limiter = RateLimiter(1_000_000)

    def send() -> None:
        for _ in range(15):
            limiter.pass_bytes(10_000, never)

    began = time.monotonic()
    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.2
