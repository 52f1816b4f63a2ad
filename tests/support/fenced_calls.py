"""Calls of what the extension offers, with memory around every tensor that no op may touch."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, empty, randn, zeros

from gpu_worker.sampling.filters import COLUMNS

MARGIN = 64  # bytes on each side
U8 = torch.uint8
HIDDEN, INNER, VOCAB = 32, 64, 11  # of the decoder: two heads of 16
SIZES = {"vocab": VOCAB, "hidden": HIDDEN, "inner": INNER, "heads": 2, "kv_heads": 2, "head_dim": 16}
SIZES |= {"eps": 1e-5, "scale": 0.25}


class Fence:
    """Makes tensors with a margin, and tells whether any byte has changed."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Tensor, Tensor]] = []  # tensor, its buffer, the buffer as it was

    def __call__(self, x: Any) -> Any:
        """A copy of the tensor, or of all that a dict or list has."""
        if isinstance(x, dict):
            return {name: self(each) for name, each in x.items()}
        if isinstance(x, list):
            return [self(each) for each in x]
        if not isinstance(x, Tensor):
            return x
        size = x.numel() * x.element_size()
        buffer = torch.full((size + 2 * MARGIN,), 0xA5, dtype=U8)
        inner = buffer[MARGIN : MARGIN + size].view(x.dtype).view(x.shape)
        inner.copy_(x)
        self._held.append((inner, buffer, buffer.clone()))
        return inner

    def is_whole(self, written: list[Tensor]) -> bool:
        """Whether nothing but `written` has changed, and that only inside."""
        places = {x.data_ptr() for x in written}
        for inner, buffer, before in self._held:
            same = buffer == before
            if inner.data_ptr() in places:
                same[MARGIN : len(same) - MARGIN] = True
            if not same.all():
                return False
        return True


@dataclass
class Call:
    """`arguments` by name; `outputs` are those that are written. `held`: what the extension refers to."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    outputs: tuple[str, ...] = ()
    held: Any = None

    def __call__(self) -> Any:
        return self.function(**self.arguments)

    def written(self) -> list[Tensor]:
        return [self.arguments[name] for name in self.outputs if isinstance(self.arguments[name], Tensor)]


def signatures(module: ModuleType) -> dict[str, str]:
    """What the module offers that takes tensors, or lists and dicts of them: `op`, `Class`, `Class.method`."""
    found = {}
    for name, thing in vars(module).items():
        if isinstance(thing, type) and not issubclass(thing, BaseException):
            found[name] = thing.__init__.__doc__
            methods = {key: each for key, each in vars(thing).items() if not key.startswith("_") and callable(each)}
            found |= {f"{name}.{key}": method.__doc__ for key, method in methods.items()}
        elif callable(thing) and not isinstance(thing, type):
            found[name] = thing.__doc__
    return {name: text for name, text in found.items() if re.search(r": (torch\.Tensor|list|dict)\b", text or "")}


class Given:
    """What a call is made for: the module, and n tokens, rows, sequences or blocks."""

    def __init__(self, module: ModuleType, fence: Fence, n: int) -> None:
        self.module, self.fence, self.n = module, fence, n

    def longs(self, *values: Any) -> Tensor:
        """The first n."""
        return torch.tensor(values[: self.n], dtype=torch.int64)

    def ints(self, *values: Any) -> Tensor:
        return torch.tensor(values[: self.n], dtype=torch.int32)

    def ends(self, dtype: torch.dtype) -> Tensor:
        return torch.arange(self.n + 1, dtype=dtype)

    def batch(self) -> dict[str, Tensor]:
        tables = torch.tensor([[0, 1], [2, 99]], dtype=torch.int32)[: self.n]
        return {"cu_q": self.ends(torch.int32), "seq_lens": self.ints(9, 3), "block_tables": tables}

    def scores(self) -> dict[str, Tensor]:
        tops = {"top_ids": torch.full((self.n, 2), -7), "top_logprobs": empty(self.n, 2)}
        return {"counts": self.ints(1, 2), "logprobs": empty(self.n), **tops}

    def matrix(self, rows: int, cols: int) -> Any:
        return self.module.Weight(self.fence(randn(rows, cols)), "f32", rows, cols)

    def packed(self, format_: str) -> Tensor:
        return zeros(self.module.packed_bytes(format_, 3, 32), dtype=U8)


CALLS: dict[str, Callable[[Given], Call]] = {}


def good_call(module: ModuleType, name: str, fence: Fence, n: int = 2) -> Call:
    """A call with n tokens, rows, sequences or blocks."""
    assert name in CALLS, f"op_calls.py has no call of {name}: add one, and it is tested with what it must refuse"
    return CALLS[name](Given(module, fence, n))


def of(name: str, *outputs: str) -> Callable[[Any], Any]:
    """For a function that has the arguments, or the call where more than one function takes part."""

    def keep(make: Callable[[Given], Any]) -> Any:
        def call(given: Given) -> Call:
            made = make(given)
            if isinstance(made, dict):
                made = Call(getattr(given.module, name), made)
            made.arguments, made.outputs = given.fence(made.arguments), outputs
            return made

        CALLS[name] = call
        return make

    return keep


def kv() -> Tensor:
    return randn(4, 2, 2, 8, 16)


def sampled(g):
    """What says how some branches draw, of two rows of five tokens."""
    floats = {"temperature": [0.5, 0.0], "top_p": [0.5, 1.0], "min_p": [0.0, 1.0], "repetition": [1.0, 2.0]}
    longs = {"seen_ids": (3, 1), "bias_ids": (0, 3), "allowed_ids": (-1, 2), "rows": (1, 0)}
    given = {"filters": torch.full((g.n, len(COLUMNS)), 0.5)}
    given |= {name: torch.tensor(values[: g.n]) for name, values in floats.items()}
    given |= {name: g.longs(*values) for name, values in longs.items()}
    given |= {name: g.longs(5, 7) for name in ("seed", "branch", "index")}
    given |= {name: randn(g.n) for name in ("seen_costs", "biases")}
    given |= {name: g.ends(torch.int64) for name in ("seen_ends", "bias_ends", "allowed_ends")}
    given |= {"mask_of": g.ints(0, -1), "masks": torch.tensor([[0b10111]], dtype=torch.int32)}
    return given | {"top_k": g.ints(0, 3)}
