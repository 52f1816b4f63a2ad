"""How much a step may hold, and which sequences come first."""

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
    policy: Literal["fcfs", "priority"] = "fcfs"  # the order of the queues: by arrival, or by class and then arrival
    max_waiting: int = 1024  # the longest waiting queue; the answer to further admissions is LATER
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    min_preempt_interval_s: float = 2.0  # so long it comes back only with headroom, and keeps what it has then
    debug: bool = False  # recount everything at every step, poison freed blocks

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
