"""How fast sequences of a lost worker are replayed on one that has work of its own.

A replay computes its whole history before its next token, in the same steps as the decoding of everybody else. So a
busy worker gets one step's worth at once, and then a quarter of its prefill speed. One that had nothing to do when the
first replay came gets all of them at once: they are its work.
"""

REPLAY_SHARE = 0.25
IDLE_CREDIT_S = 5.0  # a worker that was idle counts as idle for so long, whatever replays it has got since


class ReplayPace:
    """One worker's. Times are those of one monotonic clock."""

    __slots__ = ("_free_until", "_paid_until")

    def __init__(self) -> None:
        self._free_until = 0.0
        self._paid_until = 0.0

    def delay_s(self, now: float, num_tokens: int, *, idle: bool, tokens_per_s: float, burst_tokens: int) -> float:
        """How long a replay of so many tokens has to wait. Speed 0 is not known yet: nothing waits."""
        if idle:
            self._free_until = now + IDLE_CREDIT_S
        if now < self._free_until or tokens_per_s <= 0:
            return 0.0
        allowed = REPLAY_SHARE * tokens_per_s
        begins = max(now - burst_tokens / allowed, self._paid_until)
        self._paid_until = begins + num_tokens / allowed
        return max(0.0, begins - now)
