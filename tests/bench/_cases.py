"""What kernels.py is given: the same numbers, made from the same seed."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The last `queries` tokens of each sequence look at all that come before them."""

    sequences: int
    context: int
    queries: int
    group: int  # query heads to a head of keys
    kv_heads: int
    dim: int
    dtype: str

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def operations(self) -> float:
        """A product and a sum each for scores and for values."""
        seen = self.queries * (self.context - self.queries) + self.queries * (self.queries + 1) // 2
        return 4.0 * self.sequences * seen * self.heads * self.dim

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Float32: queries [sequence, query, head, dim], keys and values [sequence, kv_head, context, dim]."""
        made = torch.Generator().manual_seed(1)
        queries = torch.randn(self.sequences, self.queries, self.heads, self.dim, generator=made)
        one = torch.randn(2, self.kv_heads, self.context, self.dim, generator=made)
        factors = torch.rand(self.sequences, generator=made) + 0.5
        keys, values = one[:, None] * factors[:, None, None, None]
        return queries, keys, values


@dataclass(frozen=True, slots=True)
class LinearCase:
    """Inputs [columns, inner] times a matrix [rows, inner]."""

    rows: int
    inner: int
    columns: int
    form: str  # f32, bf16, q8, q4, q4_mins

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Float32: inputs, and the matrix, which does not depend on them: `PERIOD` rows again and again."""
        x, rows = (
            torch.randn(count, self.inner, generator=torch.Generator().manual_seed(seed))
            for seed, count in enumerate((self.columns, PERIOD))
        )
        return x, rows.repeat(self.rows // PERIOD, 1)


PERIOD = 256
