"""The tensors of a model that was not loaded, and the memory that a worker on a CPU would need for them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

# How a worker on a CPU can keep a folder's numbers, and the bytes of one, with its share of a scale where it has one.
Q8, Q4, Q4_ZEROS = 34 / 32, 18 / 32, 20 / 32
AS_THEY_ARE, HALVES = ("", None, None), ("--dtype bfloat16", 2.0, 2.0)
ROUNDED = (("--quantization q8", Q8, Q8), ("--quantization q4", Q4, Q8))
LEAST_ROWS = 16  # of a matrix that is rounded
COLUMNS = 32  # it has a multiple of
# Kept in 8 bits where others are in 4; the third makes keys and values of latents.
OUTER = ("embed_tokens.weight", "lm_head.weight", "kv_b_proj.weight", "proj_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "token_embd.weight", "shared.weight")  # of which a token reads a row beside a head
HEAD = re.compile(r"(.*\.)?(lm_head|proj_out)\.weight|output\.weight")
ENCODERS = ("visual.", "model.visual.", "encoder.", "model.encoder.")  # how the names of an encoder's tensors begin


@dataclass(frozen=True, slots=True)
class SizedTensor:
    """`stored` are the bytes of a number as a worker keeps it by itself; `rounds`: unless --quantization says other."""

    name: str
    numbers: int
    stored: float
    rounds: bool = True


@dataclass(frozen=True, slots=True)
class ModelSize:
    """`ways` are flags that a worker on a CPU may have, with the bytes of a number, and of an outer one; None: as the
    tensor is kept by itself."""

    tensors: list[SizedTensor]
    ways: Sequence[tuple[str, float | None, float | None]]
    slots: int  # numbers of keys and values for each token; 0: not known
    asked: float = 1.0  # the part of the experts that a token asks
    state: int = 0  # numbers of the state of recurrent layers, which each block keeps
    copied: int = 0  # numbers of an embedding that is the head, too, and that stays as it is beside a rounded head

    @property
    def num_numbers(self) -> int:
        return sum(each.numbers for each in self.tensors)

    @property
    def kept_bytes(self) -> list[tuple[str, int]]:
        """The flags that a worker on a CPU may have, and the memory of its weights then."""
        return [(flags, self._bytes(inner, outer, read=False)) for flags, inner, outer in self.ways]

    @property
    def read_bytes(self) -> list[int]:
        """How much a token of a lone stream reads with each of these flags: of experts those that it asks, of an
        embedding a row, of an encoder nothing."""
        return [self._bytes(inner, outer, read=True) for _, inner, outer in self.ways]

    def _bytes(self, inner: float | None, outer: float | None, *, read: bool) -> int:
        rounded = inner in (Q8, Q4)
        total = self.copied * Q8 if rounded else 0.0
        has_head = any(HEAD.fullmatch(each.name) for each in self.tensors) or (rounded and self.copied > 0)
        for each in self.tensors:
            is_row = (has_head and each.name.endswith(EMBEDDINGS)) or each.name.startswith(ENCODERS)
            is_expert = ".experts." in each.name or "_exps." in each.name
            part = 1.0 if not read else 0.0 if is_row else self.asked if is_expert else 1.0
            kept = outer if each.name.endswith(OUTER) else inner
            if rounded and not each.rounds:
                kept = None
            total += each.numbers * part * (each.stored if kept is None else kept)
        return int(total)
