"""When to try again, how long to wait first, and when to give up."""

import random
import time
from dataclasses import dataclass, field

from octavo import errors
from octavo.client.receiver import BrokenStreamError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a client deals with trouble. Every time is in seconds."""

    progress_timeout_s: float = 60.0  # in trouble for this long without an event: give up
    backoff_base_s: float = 0.05
    backoff_cap_s: float = 1.0
    retry_ratio: float = 0.1  # retries of refused calls, per call made
    min_retries: int = 3
    deadline_grace_s: float = 5.0  # to fetch the last tokens of a request that ran into its deadline


class RetryBudget:
    """Retries of refused calls: a part of the calls made, and always a few, so that retries never become the load."""

    def __init__(self, ratio: float = 0.1, minimum: float = 3.0) -> None:
        self._ratio = ratio
        self._minimum = minimum
        self._left = minimum

    def deposit(self) -> None:
        """Counts a call."""
        self._left = min(self._left + self._ratio, self._minimum + 10.0)

    def withdraw(self) -> bool:
        """Whether one more retry is within the budget."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def success(self) -> None:
        """A call got through: the minimum is there again for the next one."""
        self._left = max(self._left, self._minimum)


@dataclass(slots=True)
class Recovery:
    """The decisions about one call, stream or unary: feed it what went wrong, and sleep for what it answers.

    A refusal (a router said no, and that later might be better) spends the client's budget, unless the request has been
    accepted already. A broken connection loads nobody and is tried again until `progress_timeout_s` has passed.
    """

    policy: RetryPolicy
    budget: RetryBudget
    deadline: float | None = None  # on time.monotonic()
    accepted: bool = False
    _failures: int = 0
    _trouble_since: float | None = None
    _random: random.Random = field(default_factory=random.Random)

    def progress(self) -> None:
        """Something came through."""
        if not self.accepted:
            self.budget.success()
        self.accepted = True
        self._failures = 0
        self._trouble_since = None

    def was_open_for(self, seconds: float) -> None:
        """The connection that just broke had been open this long; if long, this is a new trouble."""
        if seconds > self.policy.progress_timeout_s / 2:
            self._trouble_since = None

    def delay_s(self, error: errors.ServingError | BrokenStreamError) -> float:
        """How long to wait before trying again. Raises when trying again is of no use."""
        now = time.monotonic()
        if isinstance(error, BrokenStreamError):
            error = errors.Unreachable(str(error))
        self.accepted |= isinstance(error, errors.Unreachable)  # nobody said no: it may have been
        if not error.retryable or not (self.accepted or self.budget.withdraw()):
            raise error
        if self._trouble_since is None:
            self._trouble_since = now
        delay = self._next_delay_s() + error.retry_after_ms / 1000
        limit = self._trouble_since + self.policy.progress_timeout_s
        if now + delay > limit or (self.deadline is not None and now + delay > self.deadline):
            raise error
        return delay

    def _next_delay_s(self) -> float:
        """Full jitter: uniform between 0 and a bound that doubles."""
        bound = min(self.policy.backoff_cap_s, self.policy.backoff_base_s * 2 ** min(self._failures, 32))
        self._failures += 1
        return self._random.uniform(0.0, bound)
