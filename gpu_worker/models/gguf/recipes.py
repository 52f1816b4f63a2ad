"""How tensors of a model of Transformers are made of those of a GGUF file.

llama.cpp's converter renames tensors, and changes some: it interleaves the rows of queries and keys for models that it
turns as Llama, adds the 1 to the norms of Gemma, and splits or stacks matrices. A `Recipe` undoes that. The names are
those that a model of Transformers has in memory, where the experts of a layer are one tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.gguf.header import GgufHeader
from octavo.request.errors import BadModel

Join = Callable[[Sequence[Tensor]], Tensor]


def unchanged(parts: Sequence[Tensor]) -> Tensor:
    return parts[0]


def stacked(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(parts))


def as_row(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].reshape(1, -1)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a tensor of the model is made of tensors of the file. `columns` are where its columns come from.

    `by_head`: a tensor of the file has a matrix for each head, which are taken as one, one below the other.
    """

    of: tuple[str, ...]
    join: Join = unchanged
    columns: Tensor | None = None
    by_head: bool = False

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """That of a tensor of the file, as it is taken."""
        if not self.by_head:
            return tuple(stored)
        return torch.Size(stored[:-1]).numel(), stored[-1]


@dataclass(frozen=True, slots=True)
class Family:
    """`config` is that of Transformers, with its model_type; `recipes` are by the names of the model's tensors.

    `unused` are tensors that files may have, and the model has no place for.
    """

    config: Mapping[str, Any]
    recipes: Mapping[str, Recipe]
    unused: AbstractSet[str] = frozenset()


Reader = Callable[[GgufHeader], Family]  # BadModel if the file lacks a setting or a tensor, or contradicts itself

LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PARTS = ("gate", "up", "down")
NORMED_OUTPUTS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}


def named_recipes(
    header: GgufHeader,
    inner: Mapping[str, str],
    joins: Mapping[str, Join] | None = None,
    outer: Mapping[str, str] = OUTER,
    layers: str = "model.layers",
) -> dict[str, Recipe]:
    """Recipes for the tensors that the file has, by tables of names: of layers, and of the rest.

    `joins` changes some, by their name there, or by that with the end of the tensor's.
    """
    names = {stem: (stored, stored) for stored, stem in outer.items()}
    for layer in range(header.layers):
        names |= {f"{layers}.{layer}.{stem}": (f"blk.{layer}.{stored}", stored) for stored, stem in inner.items()}
    found, changed = {}, joins or {}
    for stem, (full, stored) in names.items():
        for end in ("weight", "bias"):
            if header.has(f"{full}.{end}"):
                join = changed.get(f"{stored}.{end}") or changed.get(stored) or unchanged
                found[f"{stem}.{end}"] = Recipe((f"{full}.{end}",), join)
    return found


def shared_names(place: str) -> dict[str, str]:
    """What the matrices of experts that all tokens ask are called in files, and in the model."""
    return {f"ffn_{part}_shexp": f"{place}.{part}_proj" for part in PARTS}


# Of the one expert that all tokens ask, whose share is a sigmoid, and of the router beside it.
GATED_EXPERT = {"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
GATED_EXPERT |= shared_names("mlp.shared_expert")


def expert_recipes(header: GgufHeader, place: str, layers: Iterable[int] | None = None) -> dict[str, Recipe]:
    """The experts of these layers, or of all, as Transformers has them in memory: gate and up in one tensor."""
    found = {}
    for layer in range(header.layers) if layers is None else layers:
        to, at = f"model.layers.{layer}.{place}.experts", f"blk.{layer}.ffn_"
        found[f"{to}.gate_up_proj"] = gates_of_experts(header, at)
        found[f"{to}.down_proj"] = Recipe((f"{at}down_exps.weight",))
    return found


def gates_of_experts(header: GgufHeader, at: str) -> Recipe:
    """Files have them in one tensor, or the gates by themselves."""
    if header.has(both := f"{at}gate_up_exps.weight"):
        return Recipe((both,))
    return Recipe((f"{at}gate_exps.weight", f"{at}up_exps.weight"), lambda parts: torch.cat(tuple(parts), dim=1))


def halves(num_heads: int) -> Join:
    """Undoes llama.cpp's interleaving: row 2i of a head becomes row i, row 2i + 1 row i + half."""

    def undo(parts: Sequence[Tensor]) -> Tensor:
        rows = parts[0]
        if num_heads < 1 or len(rows) % (2 * num_heads):
            raise BadModel(f"{len(rows)} rows are not {num_heads} heads of pairs")
        paired = rows.view(num_heads, len(rows) // num_heads // 2, 2, *rows.shape[1:])
        return paired.transpose(1, 2).reshape(rows.shape)

    return undo


def turned_as_llama(header: GgufHeader) -> dict[str, Join]:
    return {"attn_q": halves(header.heads), "attn_k": halves(header.kv_heads)}


def gemma_norms(inner: Mapping[str, str]) -> dict[str, Join]:
    return dict.fromkeys([*(stored for stored in inner if "norm" in stored), "output_norm"], lambda parts: parts[0] - 1)


def row_of(head: int, count: int) -> Join:
    def pick(parts: Sequence[Tensor]) -> Tensor:
        if parts[0].dim() != 2 or len(parts[0]) != count:
            raise BadModel(f"the norms of {count} heads are {tuple(parts[0].shape)}")
        return parts[0][head].clone()

    return pick
