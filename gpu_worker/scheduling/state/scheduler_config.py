"""How much a step may hold, which sequences come first, and how the tokens of a step follow the time that it takes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's settings. Raises ValueError with the name of a setting that makes no sense."""

    max_batch_tokens: int = 2048
    step_s: float = 0.0  # how long a step with prompts should take; 0: as long as max_batch_tokens take
    max_batch_sequences: int = 256  # the most rows that sample in a step
    max_partial_prefills: int = 4  # the most prompts that are part-computed at a time
    max_long_partial_prefills: int = 1  # the most long prompts among these
    long_prefill_threshold: int = 0  # tokens from which a prompt is long; 0: what a step may run
    chunked_prefill: bool = True  # False: prompts go first, whole where they fit a step, and never beside decodes
    prefix_caching: bool = True
    host_tier: bool = True  # the prefix cache keeps evicted blocks in the host pool
    watermark: float = 0.01  # share of the blocks that new sequences leave to those already running
    speculation: Literal["off", "forced", "lookup", "recent"] = (
        "off"  # which drafts steps may have (planning/draft_planner)
    )
    policy: Literal["fcfs", "priority"] = "fcfs"  # the order of the queues: by arrival, or by class and then arrival
    max_waiting: int = 1024  # the longest waiting queue; the answer to further admissions is LATER
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    min_preempt_interval_s: float = 2.0  # so long it comes back only with headroom, and keeps what it has then
    debug: bool = False  # recount everything at every step, spoil freed blocks

    def __post_init__(self) -> None:
        for name in ("max_batch_sequences", "max_partial_prefills", "max_long_partial_prefills", "max_waiting"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not at least 1")
        for name in ("long_prefill_threshold", "min_preempt_interval_s", "step_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is negative")
        if not self.max_batch_tokens >= self.max_batch_sequences:
            raise ValueError(
                f"max_batch_tokens: {self.max_batch_tokens} is below max_batch_sequences ({self.max_batch_sequences}), "
                "so that a full batch could not run"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark: {self.watermark} is not in [0, 1)")


START_TOKENS = 256
MAX_CHANGE = 2.0  # the most that one step changes the budget, as a factor: one disturbed step says little
ROOM = 0.8  # share of the wanted time: a full step that took less lets the budget grow by a block


class StepBudget:
    """How many tokens a step may run: `max_batch_tokens` or, with `step_s`, as many as steps were seen to run in that.

    A step with a piece of a prompt delays all branches that decode, and the lease is renewed between steps. The time
    that a token takes differs a thousandfold between models and machines, so no constant suits all of them.
    """

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
