"""How fast sequences of a lost worker are replayed on a worker that has work of its own.

A worker computes the whole history of a replayed sequence before the sequence's next token, in the same steps in which
it decodes its other sequences. So a busy worker gets one step's worth of replays at once, and the rest at a quarter of
its prefill speed. A worker that had nothing to do when the first replay came gets all replays at once.
"""

REPLAY_SHARE = 0.25
IDLE_CREDIT_S = 5.0  # how long a worker that was idle counts as idle, whatever replays it has got since


class ReplayPace:
    """The pace of one worker. All times are of one monotonic clock."""

    __slots__ = ("_booked_until", "_idle_until")

    def __init__(self) -> None:
        self._idle_until = 0.0
        self._booked_until = 0.0

    def book_replay(self, now: float, num_tokens: int, *, idle: bool, tokens_per_s: float, burst_tokens: int) -> float:
        """Books the next replay, of `num_tokens`, and returns for how many seconds it must wait.

        A `tokens_per_s` of 0 means that the worker's speed is not known yet: then no replay waits.
        """
        if idle:
            self._idle_until = now + IDLE_CREDIT_S
        if now < self._idle_until or tokens_per_s <= 0:
            return 0.0
        allowed = REPLAY_SHARE * tokens_per_s
        begins = max(now - burst_tokens / allowed, self._booked_until)
        self._booked_until = begins + num_tokens / allowed
        return max(0.0, begins - now)
