"""How busy this worker is: what a worker reports to routers, and what routers place sequences by."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy the scheduler is now; fields as in octavo.v1.Load."""

    num_running: int  # branches
    num_waiting: int
    num_swapped: int
    num_sequences: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_free_host_blocks: int
    num_prefill_tokens: int
    num_preempted_swap: int
    num_preempted_recompute: int
