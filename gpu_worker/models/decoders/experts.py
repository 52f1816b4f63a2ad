"""Mixtures of experts in the place of a layer's MLP: which models have them, and what they compute.

A token's experts are those with the largest scores, and its MLP is their sum, each by its share of a softmax over all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.model_files.quantization import MIXTURES

# Where checkpoints have a layer's router and experts, and what the matrices of an expert are called there.
PLACES = {"mlp": ("gate_proj", "up_proj", "down_proj"), "block_sparse_moe": ("w1", "w3", "w2")}


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of the layers that have some."""

    count: int
    top: int  # how many a token asks
    inner: int
    shares_sum_to_one: bool  # those of the asked ones; else those of all
    shared_inner: int = 0  # of one more that every token asks; 0: there is none

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "ExpertsConfig | None":
        """None for a model without experts."""
        family = str(config.get("model_type"))
        if family not in MIXTURES:
            return None
        count = int(config.get("num_local_experts") or config.get("num_experts") or 0)
        mixtral = family == "mixtral"
        found = cls(
            count,
            int(config["num_experts_per_tok"]),
            int(config["intermediate_size" if mixtral else "moe_intermediate_size"]),
            mixtral or bool(config.get("norm_topk_prob", False)),
            int(config["shared_expert_intermediate_size"]) if family == "qwen2_moe" else 0,
        )
        if not (1 <= found.top <= found.count and found.inner > 0):
            raise ValueError(f"{found.top} of {found.count} experts of {found.inner} rows")
        return found


def matrices_of(prefix: str, place: str, expert: int) -> tuple[list[str], str]:
    """The tensors of an expert's gate and up projections, and of its down projection."""
    gate, up, down = (f"{prefix}{place}.experts.{expert}.{name}.weight" for name in PLACES[place])
    return [gate, up], down


def expert_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts."""
    if config.get("model_type") not in MIXTURES:
        return (False,) * num_layers
    step, plain = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or []
    return tuple(layer not in plain and (layer + 1) % step == 0 for layer in range(num_layers))


def run_experts(
    config: ExpertsConfig,
    tensors: Mapping[str, Tensor],
    x: Tensor,
    linear: Callable[..., Tensor],
    mlp: Callable[..., Tensor],
) -> Tensor:
    """What the experts make of x [tokens, hidden]. `mlp` is given x, and the matrices of one of them."""
    scores = linear(x.float(), tensors["router"].float())  # rounded scores choose other experts
    shares, chosen = torch.softmax(scores, dim=-1).topk(config.top, dim=-1)
    if config.shares_sum_to_one:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    made = x.new_empty((*chosen.shape, x.shape[-1]))
    for expert in chosen.unique().tolist():
        token, place = torch.where(chosen == expert)
        stem = f"experts.{expert}"
        made[token, place] = mlp(x[token], tensors[f"{stem}.gate_up"], tensors[f"{stem}.down"])
    out = torch.zeros(x.shape, device=x.device)
    for index in range(config.top):
        out += shares[:, index, None] * made[:, index]
    if config.shared_inner:
        share = torch.sigmoid(linear(x, tensors["shared_gate"]).float())
        out += share * mlp(x, tensors["shared_gate_up"], tensors["shared_down"])
    return out.to(x.dtype)
