"""How many tokens a step may run: a fixed number, or what takes as long as a step is wanted to take, as measured.

A step with a piece of a prompt delays everybody who decodes, and the lease is renewed between steps. How long a token
takes differs by a thousandfold between models and machines, so no constant suits all.
"""

from gpu_worker.scheduling.scheduler_config import SchedulerConfig

START_TOKENS = 256
MAX_CHANGE = 2.0  # per step: one that was disturbed says little
ROOM = 0.8  # of the wanted time: a full step that took less gets a block more, whatever its rate says


class StepBudget:
    """Between one block and `max_batch_tokens`; all of these where no time is given."""

    def __init__(self, config: SchedulerConfig, block_size: int) -> None:
        self._step_s = config.step_s
        self._low = min(block_size, config.max_batch_tokens)
        self._high = config.max_batch_tokens
        self._threshold = config.long_prefill_threshold
        self.tokens = min(START_TOKENS, self._high) if self._step_s else self._high

    @property
    def long_prefill(self) -> int:
        """Tokens from which a prompt is long."""
        return self._threshold or self.tokens

    def for_prompts(self, num_decodes: int) -> int:
        """What decodes leave. Where the budget follows the time, a batch of decodes never shuts prompts out."""
        left = self._high - num_decodes
        return min(left, max(self.tokens - num_decodes, self._low)) if self._step_s else left

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step with prompts. A small one that was quick says nothing about large ones.

        What every step costs, however small, counts here as its tokens' time. So a quick step shows that more fit than
        its rate says, and never that fewer do.
        """
        if not self._step_s or seconds <= 0:
            return
        wanted = num_tokens * self._step_s / seconds
        if seconds < self._step_s:
            if 2 * num_tokens < self.tokens:
                return
            full = num_tokens > self.tokens - self._low
            more = self._low if full and seconds < ROOM * self._step_s else 0
            wanted = max(wanted, self.tokens + more)
        wanted = min(max(wanted, self.tokens / MAX_CHANGE), self.tokens * MAX_CHANGE)
        whole = int(wanted) // self._low * self._low
        self.tokens = min(max(whole, self._low), self._high)
