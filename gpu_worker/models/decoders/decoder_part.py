"""The seam at which a decoder whose steps are called op by op is divided: what a process has, and what it joins."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gpu_worker.ops import TokenBatch


class DecoderPart:
    """What one process has of a decoder: here all of it. Ranks that share one have teams in the place of this."""

    def __init__(self, num_kv_heads: int) -> None:
        self.first_kv_head = 0
        self.num_kv_heads = num_kv_heads

    def forward(self, decoder: Any, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Any:
        """What `Decoder.forward` returns."""
        return decoder.compute(batch, kv, rows)

    def logits(self, decoder: Any, hidden: Tensor) -> Any:
        """Scores [num_rows, vocab_size] of rows of what `forward` returned."""
        return decoder.own_logits(hidden)

    def join(self, name: str, own: Tensor) -> Tensor:
        """Of all ranks the columns of what has this name, of which these are the own ones."""
        return own

    def own(self, name: str, joined: Tensor) -> Tensor:
        """The own columns again."""
        return joined
