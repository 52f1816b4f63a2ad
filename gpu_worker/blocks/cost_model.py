"""How long it takes to copy blocks and to compute them, as measured.

Preemption takes the quicker way, and so does a sequence that begins with blocks in the host pool.
"""

from dataclasses import dataclass, field

from gpu_worker.drafting.row_costs import RowCosts


@dataclass(slots=True)
class CostModel:
    """The rates of copying and computing: guesses at first, then figures that the engine reports by `observe_*`."""

    copy_bytes_per_s: float = 4e9
    prefill_tokens_per_s: float = 2000.0
    rows: RowCosts = field(default_factory=RowCosts)
    weight: float = 0.2  # of a new measurement; all earlier ones together have the rest

    def observe_copy(self, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0 and seconds > 0:
            self.copy_bytes_per_s += self.weight * (num_bytes / seconds - self.copy_bytes_per_s)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        if num_tokens > 0 and seconds > 0:
            self.prefill_tokens_per_s += self.weight * (num_tokens / seconds - self.prefill_tokens_per_s)

    def swap_s(self, num_bytes: int) -> float:
        """How long it takes to copy the blocks out and in again."""
        return 2 * self.copy_s(num_bytes)

    def copy_s(self, num_bytes: int) -> float:
        """How long it takes to copy the blocks one way."""
        return num_bytes / self.copy_bytes_per_s

    def recompute_s(self, num_tokens: int) -> float:
        """How long it takes to compute the tokens again."""
        return num_tokens / self.prefill_tokens_per_s

    def swap_is_cheaper(self, num_bytes: int, num_tokens: int) -> bool:
        return self.swap_s(num_bytes) < self.recompute_s(num_tokens)

    def copy_is_cheaper(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether blocks that are in the host pool come sooner by a copy than by computing their tokens."""
        return self.copy_s(num_bytes) < self.recompute_s(num_tokens)
