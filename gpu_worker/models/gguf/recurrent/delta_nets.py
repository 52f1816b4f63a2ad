"""Gated delta nets: Qwen3-Next, and Qwen3.5 with and without experts.

A head of keys serves several of values. Transformers has these beside each other, and so has a file of Qwen3-Next. In
files of Qwen3.5 the first one of every head of keys comes first, then the second one of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.recipes import (
    GATED_EXPERT,
    LLAMA,
    Family,
    Join,
    Recipe,
    as_row,
    expert_recipes,
    gemma_norms,
    named_recipes,
)
from gpu_worker.models.gguf.settings import (
    beside_experts,
    common,
    drafting_layers,
    experts,
    rms,
    unused_layers,
)
from octavo.request.errors import BadModel

COMMON = {
    **{stored: stem for stored, stem in LLAMA.items() if stored != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_out": "linear_attn.out_proj",
}
QWEN35 = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
USUAL_PERIOD = 4  # of layers, of which the last one attends


def read_qwen35(header: GgufHeader) -> Family:
    config, heads, unused = _settings(header, "qwen3_5_text")
    config |= {"intermediate_size": header.inner_size()}
    return Family(config, _recipes(header, COMMON | QWEN35, heads, heads.grouped), unused)


def read_qwen35moe(header: GgufHeader) -> Family:
    config, heads, unused = _settings(header, "qwen3_5_moe_text")
    recipes = _recipes(header, COMMON | QWEN35 | GATED_EXPERT, heads, heads.grouped) | expert_recipes(header, "mlp")
    return Family(config | experts(header) | beside_experts(header), recipes, unused)


def read_qwen3next(header: GgufHeader) -> Family:
    config, heads, unused = _settings(header, "qwen3_next")
    inner = COMMON | GATED_EXPERT | {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"}
    recipes = _recipes(header, inner, heads, lambda size, before=0: None) | expert_recipes(header, "mlp")
    for layer in range(header.layers):
        at = f"blk.{layer}."
        if header.has(f"{at}attn_qkv.weight"):  # early files have them with the gates in one tensor
            both = Recipe((f"{at}attn_qkv.weight", f"{at}attn_gate.weight"), heads.together)
            recipes[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"] = both
    return Family(config | experts(header) | beside_experts(header) | {"norm_topk_prob": True}, recipes, unused)


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer's keys and values, and their sizes."""

    keys: int
    values: int
    key_size: int
    value_size: int

    @property
    def rows(self) -> int:
        """Of queries, keys and values together."""
        return 2 * self.keys * self.key_size + self.values * self.value_size

    def grouped(self, size: int, before: int = 0) -> Tensor | None:
        """Where the rows or columns of heads of values come from, `size` of each; `before` others keep their place.

        None: all keep theirs.
        """
        if self.keys == self.values:
            return None
        places = torch.arange(self.values * size).view(-1, self.keys, size).transpose(0, 1).flatten()
        return torch.cat((torch.arange(before), before + places))

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """For each head of keys its queries, keys, values and their gates, of queries, keys and values of all."""
        if [len(part) for part in parts] != [self.rows, self.values * self.value_size]:
            raise BadModel(f"queries, keys, values and gates of {self} have {[len(part) for part in parts]} rows")
        (stacked, gates), size = parts, self.keys * self.key_size
        queries, keys, values = stacked[:size], stacked[size : 2 * size], stacked[2 * size :]
        by_head = [part.view(self.keys, -1, part.shape[-1]) for part in (queries, keys, values, gates)]
        return torch.cat(by_head, dim=1).flatten(0, 1)


def _settings(header: GgufHeader, model_type: str) -> tuple[dict[str, Any], Heads, frozenset[str]]:
    """The configuration that all have, the heads, and the tensors of layers that draft tokens."""
    unused = unused_layers(header, drafting_layers(header))
    header.get("rope.dimension_sections")  # of places in pictures; those of text are equal in all sections
    heads, inner = _heads(header), header.integer("ssm.inner_size")
    if inner != heads.values * heads.value_size:
        raise BadModel(f"{header.name}: {inner} values are not {heads.values} heads (ssm.inner_size)")
    config = common(header, model_type, **rms(header)) | {
        "attention_bias": header.has(f"blk.{header.first_attending}.attn_q.bias"),
        "layer_types": _kinds(header),
        "linear_conv_kernel_dim": header.integer("ssm.conv_kernel"),
        "linear_num_key_heads": heads.keys,
        "linear_num_value_heads": heads.values,
        "linear_key_head_dim": heads.key_size,
        "linear_value_head_dim": heads.value_size,
    }
    return config, heads, unused


def _heads(header: GgufHeader) -> Heads:
    keys, values = header.integer("ssm.group_count"), header.integer("ssm.time_step_rank")
    size, inner = header.integer("ssm.state_size"), header.integer("ssm.inner_size")
    if not 1 <= keys <= values <= inner or values % keys or size < 1:
        raise BadModel(
            f"{header.name}: {keys} heads of {size} keys for {values} of values (ssm.group_count, ssm.time_step_rank)"
        )
    return Heads(keys, values, size, inner // values)


def _kinds(header: GgufHeader) -> list[str]:
    listed = header.get("attention.recurrent_layers")
    period = header.integer("full_attention_interval", USUAL_PERIOD)
    if isinstance(listed, list) and len(listed) >= header.layers:
        recurrent = [bool(each) for each in listed[: header.layers]]
    elif listed is not None or period < 1:
        raise BadModel(f"{header.name}: {header.arch} does not say which layers attend ({listed!r}, every {period}th)")
    else:
        recurrent = [(layer + 1) % period != 0 for layer in range(header.layers)]
    return ["linear_attention" if each else "full_attention" for each in recurrent]


def _recipes(
    header: GgufHeader, inner: dict[str, str], heads: Heads, order: Callable[..., Tensor | None]
) -> dict[str, Recipe]:
    values, others = order(heads.value_size), order(heads.value_size, 2 * heads.keys * heads.key_size)
    joins: dict[str, Join] = {
        **gemma_norms(inner),
        "attn_gate": _rows(values),
        "attn_qkv": _rows(others),
        "ssm_alpha": _rows(order(1)),
        "ssm_beta": _rows(order(1)),
        "ssm_conv1d": lambda parts: _rows(others)(parts).unsqueeze(1),
        "ffn_gate_inp_shexp": as_row,
    }
    recipes = named_recipes(header, inner, joins)
    for layer in range(header.layers):
        to, at = f"model.layers.{layer}.linear_attn", f"blk.{layer}.ssm_"
        if header.has(f"{at}out.weight"):
            recipes[f"{to}.out_proj.weight"] = Recipe((f"{at}out.weight",), columns=values)
            recipes[f"{to}.norm.weight"] = Recipe((f"{at}norm.weight",))
            recipes[f"{to}.dt_bias"] = Recipe((f"{at}dt.bias",), _rows(order(1)))
            recipes[f"{to}.A_log"] = Recipe((f"{at}a",), lambda parts: _rows(order(1))(parts).neg().log())
    return recipes


def _rows(order: Tensor | None) -> Join:
    def move(parts: Sequence[Tensor]) -> Tensor:
        if order is None:
            return parts[0]
        if len(parts[0]) != len(order):
            raise BadModel(f"{len(parts[0])} rows of heads should be {len(order)}")
        return parts[0][order]

    return move
