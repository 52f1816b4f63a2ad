"""Experts of a model in torch whose matrices the extension multiplies with. What chooses them stays torch's."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpu_worker.models.packed.packed_weights import NativeMatrix

# What the matrices of one expert are called beside its number: gate and up, and down.
NAMES = ((("gate_proj", "up_proj"), "down_proj"), (("w1", "w3"), "w2"))
STACKS = ("gate_up_proj", "up_proj", "down_proj")  # the tensors of all experts together, in memory


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The matrices of a module's experts in a source, by expert: those of what is gated, and those that lead back."""

    inner: list[list[str]]
    outer: list[list[str]]

    def all(self) -> list[str]:
        return [name for names in (*self.inner, *self.outer) for name in names]


class PackedExperts(nn.Module):
    """In the place of the experts of a layer. Each has one matrix or more for its inner states, and for what leads
    back; `gate` makes inner states of what the first give."""

    def __init__(
        self,
        inner: Sequence[Sequence[NativeMatrix]],
        outer: Sequence[Sequence[NativeMatrix]],
        gate: Callable[[Tensor], Tensor],
        extension: ModuleType,
    ) -> None:
        super().__init__()
        self.inner, self.outer = inner, outer
        self._gate = gate
        self._extension = extension

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum of what its experts make of each token [tokens, hidden], by their shares [tokens, top]."""
        tokens, top = top_k_index.shape
        asked = top_k_index.flatten()
        order = asked.argsort(stable=True)
        counts = torch.bincount(asked, minlength=len(self.inner)).tolist()
        rows = hidden_states.float()[order // top]
        both = self._multiplied(self.inner, rows, counts)
        made = self._multiplied(self.outer, self._gate(both).contiguous(), counts)
        sorted_back = torch.empty_like(made)
        sorted_back[order] = made * top_k_weights.flatten().float()[order, None]
        return sorted_back.view(tokens, top, -1).sum(dim=1).to(hidden_states.dtype)

    def _multiplied(self, matrices: Sequence[Sequence[NativeMatrix]], rows: Tensor, counts: Sequence[int]) -> Tensor:
        """What each expert's matrices make of its rows, which lie one after another."""
        widths = [matrix.weight.rows for matrix in matrices[0]]
        outs = [torch.empty((len(rows), width)) for width in widths]
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            end = start + count
            for out, matrix in zip(outs, matrices[expert], strict=True):
                self._extension.linear(out[start:end], rows[start:end], matrix.weight)
            start = end
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)


def expert_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The tensors of a module's experts by their own names, if it computes what PackedExperts does; else empty.

    Such a module is of a class that Transformers runs in several ways (use_experts_implementation).
    """
    kind = cast("Any", module)
    if not hasattr(module, "_is_expert_parallel") or not hasattr(type(module), "_apply_gate"):
        return {}
    if kind.has_bias or kind.is_transposed or kind.has_post_expert_norm or not kind.is_concatenated:
        return {}
    found = {name: tuple(weight.shape) for name, weight in module.named_parameters(recurse=False)}
    expected = {"gate_up_proj" if kind.has_gate else "up_proj", "down_proj"}
    return found if set(found) == expected else {}


def expert_names(stored: Collection[str], name: str, module: nn.Module) -> ExpertNames | None:
    """None unless a source has each matrix of the module's experts by itself. `name` is the module's."""
    count, gated = int(module.get_parameter("down_proj").shape[0]), bool(cast("Any", module).has_gate)
    for first, last in NAMES:
        inner = [[f"{name}.{expert}.{part}.weight" for part in first[not gated :]] for expert in range(count)]
        outer = [[f"{name}.{expert}.{last}.weight"] for expert in range(count)]
        found = ExpertNames(inner, outer)
        if all(each in stored for each in found.all()):
            return found
    return None


def gate_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """How the module makes inner states of what is gated; its own tensors are given up."""
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        delattr(module, name)
    kind = cast("Any", module)
    return cast("Callable[[Tensor], Tensor]", kind._apply_gate if kind.has_gate else kind.act_fn)
