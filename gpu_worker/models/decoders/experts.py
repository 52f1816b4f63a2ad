"""Mixtures of experts in the place of a layer's MLP: their sizes and variations, their tensors, and what they compute.

A token's experts are those of the highest rank, and its MLP is their sum, each by its share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import CheckpointReader
from gpu_worker.models.decoders.decoder import sigmoid
from gpu_worker.ops import Ops

# Where checkpoints have a layer's router and experts, and what the matrices of an expert are called there.
PLACES = {"mlp": ("gate_proj", "up_proj", "down_proj"), "block_sparse_moe": ("w1", "w3", "w2")}
ROUTERS = ("gate", "router", "router.gate")
CORRECTIONS = (  # what is added to shares where experts are chosen
    *("gate.e_score_correction_bias", "e_score_correction_bias", "moe_statics.e_score_correction_bias", "expert_bias"),
)
SHARED = ("shared_expert", "shared_experts", "shared_mlp")
M = TypeVar("M")
StackTensors = Callable[[list[str], list[tuple[int, ...]]], M]  # tensors by name and shape, one below the other


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts of the layers that have some."""

    count: int
    top: int  # how many a token asks
    inner: int
    sigmoid: bool = False  # shares are sigmoids of scores; else a softmax over all experts
    shares_sum_to_one: bool = False  # those of the asked ones
    share_scale: float = 1.0  # what shares are multiplied with
    corrected: bool = False  # a number for each expert is added to its share where experts are chosen
    groups: int = 1  # experts are chosen from the best groups
    top_groups: int = 1
    best_per_group: int = 2  # the ranks of so many experts, 1 or 2, are a group's, by which these are found
    biased: bool = False  # router and experts have biases
    swiglu_alpha: float = 0.0  # of gates like those of gpt-oss, with their limit; 0: SiLU
    swiglu_limit: float = 0.0
    shared_inner: int = 0  # of one more that every token asks; 0: there is none
    shared_gated: bool = False  # by a share of its own; else whole

    @property
    def asked_inner(self) -> int:
        """How long the inner states of all the experts that a token asks are together."""
        return self.top * self.inner + self.shared_inner

    def __post_init__(self) -> None:
        if not (1 <= self.top <= self.count and self.inner > 0):
            raise ValueError(f"{self.top} of {self.count} experts of {self.inner} rows")
        size = self.count // self.groups if self.groups > 0 and self.count % self.groups == 0 else 0
        if (
            size < (self.best_per_group if self.groups > 1 else 1)
            or not 1 <= self.top_groups <= self.groups
            or self.top > size * self.top_groups
        ):
            raise ValueError(f"{self.top} experts of {self.top_groups} of {self.groups} groups of {self.count}")


def matrices_of(prefix: str, place: str, expert: int) -> tuple[list[str], str]:
    """The tensors of an expert's gate and up projections, and of its down projection, without their ends."""
    gate, up, down = (f"{prefix}{place}.experts.{expert}.{name}" for name in PLACES[place])
    return [gate, up], down


def read_experts(
    checkpoint: CheckpointReader, matrix: StackTensors[M], experts: ExpertsConfig, hidden: int, prefix: str
) -> dict[str, Tensor | M]:
    """The tensors of a layer's experts by our names: the router's in floats, and the matrices of all."""
    count, inner, shared = experts.count, experts.inner, experts.shared_inner
    routers = [(place, f"{prefix}{place}.{name}") for place in PLACES for name in ROUTERS]
    place, router = next((each for each in routers if f"{each[1]}.weight" in checkpoint), routers[0])
    tensors: dict[str, Tensor | M] = {"router": checkpoint.read_tensor(f"{router}.weight", (count, hidden))}
    if experts.corrected:
        named = [f"{prefix}{place}.{name}" for name in CORRECTIONS]
        found = next((name for name in named if name in checkpoint), named[0])
        tensors["router_correction"] = checkpoint.read_floats(found, (count,))
    for expert in range(count):
        both, down = matrices_of(prefix, place, expert)
        tensors[f"experts.{expert}.gate_up"] = matrix([f"{name}.weight" for name in both], [(inner, hidden)] * 2)
        tensors[f"experts.{expert}.down"] = matrix([f"{down}.weight"], [(hidden, inner)])
    if experts.biased:
        of_all = [matrices_of(prefix, place, expert) for expert in range(count)]
        tensors["router_bias"] = checkpoint.read_tensor(f"{router}.bias", (count,))
        rows = [checkpoint.read_stacked([f"{name}.bias" for name in both], [(inner,)] * 2) for both, _ in of_all]
        tensors["expert_gate_up_bias"] = torch.stack(rows)
        rows = [checkpoint.read_tensor(f"{down}.bias", (hidden,)) for _, down in of_all]
        tensors["expert_down_bias"] = torch.stack(rows)
    if shared:
        stems = [f"{prefix}{place}.{name}" for name in SHARED]
        stem = next((name for name in stems if f"{name}.down_proj.weight" in checkpoint), stems[0])
        both = [f"{stem}.{name}_proj.weight" for name in ("gate", "up")]
        tensors["shared_gate_up"] = matrix(both, [(shared, hidden)] * 2)
        tensors["shared_down"] = matrix([f"{stem}.down_proj.weight"], [(hidden, shared)])
        if experts.shared_gated:
            tensors["shared_gate"] = checkpoint.read_tensor(f"{stem}_gate.weight", (1, hidden))
    return tensors


def choose(config: ExpertsConfig, scores: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """The experts of each token by its scores [tokens, experts], and their shares: both [tokens, top]."""
    parts = sigmoid(scores) if config.sigmoid else torch.softmax(scores, dim=-1)
    ranks = parts if correction is None else parts + correction
    if config.groups > 1:
        grouped = ranks.view(len(ranks), config.groups, -1)
        best = grouped.topk(config.best_per_group, dim=-1).values.sum(-1).topk(config.top_groups, dim=-1).indices
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=ranks.device).scatter_(1, best, True)
        ranks = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).view_as(ranks)
    chosen = ranks.topk(config.top, dim=-1).indices
    shares = parts.gather(-1, chosen)
    if config.shares_sum_to_one:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return chosen, shares * config.share_scale


def run_experts(config: ExpertsConfig, tensors: Mapping[str, Tensor], x: Tensor, ops: Ops) -> Tensor:
    """What the experts make of x [tokens, hidden]."""
    chosen, shares = _routed(config, tensors, x, ops)
    made = x.new_empty((*chosen.shape, x.shape[-1]))
    for expert in chosen.unique().tolist():
        token, place = torch.where(chosen == expert)
        made[token, place] = _mlp(config, tensors, expert, x[token], ops)
    out = torch.zeros(x.shape, device=x.device)
    for index in range(config.top):
        out += shares[:, index, None] * made[:, index]
    if config.shared_inner:
        inner = ops.silu_and_mul(ops.linear(x, tensors["shared_gate_up"]))
        whole = ops.linear(inner, tensors["shared_down"])
        out += _share_of_shared(config, tensors, x, ops) * whole
    return out.to(x.dtype)


def run_divided_experts(
    config: ExpertsConfig, tensors: Mapping[str, Tensor], x: Tensor, ops: Ops, join: Callable[[str, Tensor], Tensor]
) -> Tensor:
    """The same, of ranks that have some rows of each expert (not of gpt-oss's, which have biases): they join the inner
    states of all experts at once, and what is made of them, so that what is joined has one size whoever is asked."""
    chosen, shares = _routed(config, tensors, x, ops)
    asked = [(expert, torch.where(chosen == expert)) for expert in chosen.unique().tolist()]
    inner = x.new_empty((*chosen.shape, tensors["experts.0.gate_up"].shape[0] // 2))
    for expert, (token, place) in asked:
        inner[token, place] = ops.silu_and_mul(ops.linear(x[token], tensors[f"experts.{expert}.gate_up"]))
    inner = join("expert_inner", inner.flatten(0, 1)).unflatten(0, chosen.shape)
    made = x.new_empty((*chosen.shape, tensors["experts.0.down"].shape[0]))
    for expert, (token, place) in asked:
        made[token, place] = ops.linear(inner[token, place], tensors[f"experts.{expert}.down"])
    out = torch.zeros((x.shape[0], made.shape[-1]), device=x.device)
    for index in range(config.top):
        out += shares[:, index, None] * made[:, index]
    if config.shared_inner:
        both = ops.linear(x, tensors["shared_gate_up"])
        whole = ops.linear(join("shared_inner", ops.silu_and_mul(both)), tensors["shared_down"])
        out += _share_of_shared(config, tensors, x, ops) * whole
    return join("down", out.to(x.dtype))


def _routed(config: ExpertsConfig, tensors: Mapping[str, Tensor], x: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
    """The experts of each token of x, and their shares."""
    bias = tensors.get("router_bias")
    # Rounded scores choose other experts.
    scores = ops.linear(x.float(), tensors["router"].float(), None if bias is None else bias.float())
    return choose(config, scores, tensors.get("router_correction"))


def _share_of_shared(config: ExpertsConfig, tensors: Mapping[str, Tensor], x: Tensor, ops: Ops) -> Tensor | float:
    return sigmoid(ops.linear(x, tensors["shared_gate"]).float()) if config.shared_gated else 1.0


def _mlp(config: ExpertsConfig, tensors: Mapping[str, Tensor], expert: int, x: Tensor, ops: Ops) -> Tensor:
    """What one of the experts makes of x."""

    def bias(name: str) -> Tensor | None:
        return tensors[f"expert_{name}_bias"][expert] if config.biased else None

    both = ops.linear(x, tensors[f"experts.{expert}.gate_up"], bias("gate_up"))
    inner = _clamped_swiglu(config, both) if config.swiglu_alpha else ops.silu_and_mul(both)
    return ops.linear(inner, tensors[f"experts.{expert}.down"], bias("down"))


def _clamped_swiglu(config: ExpertsConfig, both: Tensor) -> Tensor:
    """As gpt-oss has it: the gate is no larger than the limit, and what it gates lies within it and is one more."""
    gate, up = both.chunk(2, dim=-1)
    gate, up = gate.clamp(max=config.swiglu_limit), up.clamp(-config.swiglu_limit, config.swiglu_limit)
    return (up + 1) * (gate * sigmoid(gate * config.swiglu_alpha))
