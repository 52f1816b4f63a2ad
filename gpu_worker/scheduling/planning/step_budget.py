"""How many tokens a step may run: a fixed number, or as many as a step of the wanted length can run.

A step with a piece of a prompt delays all branches that decode, and the lease is renewed between steps. The time that a
token takes differs a thousandfold between models and machines, so no constant suits all of them.
"""

from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig

START_TOKENS = 256
MAX_CHANGE = 2.0  # the most that one step changes the budget, as a factor: one disturbed step says little
ROOM = 0.8  # share of the wanted time: a full step that took less lets the budget grow by a block


class StepBudget:
    """Always `max_batch_tokens` without `step_s`; with it, from one block to `max_batch_tokens`, by measured steps."""

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
        """How many tokens of prompts a step may run beside its decodes.

        A budget that follows the time leaves prompts at least a block, however many branches decode.
        """
        left = self._high - num_decodes
        return min(left, max(self.tokens - num_decodes, self._low)) if self._step_s else left

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from the time of a step with prompts. A small step that was quick says nothing about large ones.

        The fixed cost of a step counts here as time of its tokens. So a step that was quicker than wanted never lowers
        the budget, whatever its tokens per second were.
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
