"""Decides when a call is tried again, how long it waits before that, and when it is given up."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.client.receiver import BrokenStreamError
from octavo.request import errors


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a client retries and when it gives up. All times are in seconds."""

    # A call that fails for this long without an event is given up: in this time a worker loads a large model.
    progress_timeout_s: float = 300.0
    first_answer_timeout_s: float = 60.0  # the same, while no router has ever answered it: perhaps there is none
    backoff_base_s: float = 0.05
    backoff_cap_s: float = 1.0
    retry_ratio: float = 0.1  # how many retries of calls that were one too many each call adds to the budget
    min_retries: int = 3
    deadline_grace_s: float = 5.0  # time to fetch the last tokens of a request whose deadline has passed
    # Called before each new try with the error, and for how many seconds the call has been failing.
    on_retry: Callable[[errors.ServingError, float], None] | None = None


class RetryBudget:
    """How many calls that were one too many may be retried: a share of the calls made, and always a few.

    So retries never become the load that makes routers refuse calls.
    """

    def __init__(self, ratio: float = 0.1, minimum: float = 3.0) -> None:
        self._ratio = ratio
        self._minimum = minimum
        self._left = minimum

    def deposit(self) -> None:
        """Counts a new call, which adds to the budget."""
        self._left = min(self._left + self._ratio, self._minimum + 10.0)

    def withdraw(self) -> bool:
        """Spends one retry. False if the budget has none left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def success(self) -> None:
        """Notes that a call has got through: the budget is at least at its minimum again."""
        self._left = max(self._left, self._minimum)


@dataclass(slots=True)
class Recovery:
    """Decides about one call, stream or unary: `delay_s` takes each error, and says how long to wait before a retry.

    A call that is one too many for a router (RESOURCE_EXHAUSTED) spends a retry of the client's budget, unless the
    request has been accepted already. Where somebody is missing (a router, the workers, the store), a call puts no load
    on anybody: it is tried again until the policy's time has passed.
    """

    policy: RetryPolicy
    budget: RetryBudget
    deadline: float | None = None  # on time.monotonic()
    accepted: bool = False
    _answered: bool = False
    _failures: int = 0
    _trouble_since: float | None = None

    def progress(self) -> None:
        """Notes that an event or a reply has arrived."""
        if not self.accepted:
            self.budget.success()
        self.accepted = self._answered = True
        self._failures = 0
        self._trouble_since = None

    def was_open_for(self, seconds: float) -> None:
        """Notes how long the broken connection was open. After a long time, `progress_timeout_s` begins anew."""
        if seconds > self.policy.progress_timeout_s / 2:
            self._trouble_since = None

    def delay_s(self, error: errors.ServingError | BrokenStreamError) -> float:
        """How long to wait before the next try. Raises the error if another try is of no use."""
        now = time.monotonic()
        if isinstance(error, BrokenStreamError):
            error = errors.Unreachable(str(error))
        self.accepted |= isinstance(error, errors.Unreachable)  # no router has refused it, so one may have accepted it
        self._answered |= not isinstance(error, errors.Unreachable)
        is_too_many = error.code is errors.Code.RESOURCE_EXHAUSTED and not self.accepted
        if not error.retryable or (is_too_many and not self.budget.withdraw()):
            raise error
        if self._trouble_since is None:
            self._trouble_since = now
        delay = self._next_delay_s() + error.retry_after_ms / 1000
        limit = self._trouble_since + self._patience_s()
        if now + delay > limit or (self.deadline is not None and now + delay > self.deadline):
            raise error
        if self.policy.on_retry is not None:
            self.policy.on_retry(error, now - self._trouble_since)
        return delay

    def _patience_s(self) -> float:
        patience_s = self.policy.progress_timeout_s
        return patience_s if self._answered else min(patience_s, self.policy.first_answer_timeout_s)

    def _next_delay_s(self) -> float:
        """A random time between 0 and a bound that doubles with each failure (full jitter)."""
        bound = min(self.policy.backoff_cap_s, self.policy.backoff_base_s * 2 ** min(self._failures, 32))
        self._failures += 1
        return random.uniform(0.0, bound)
