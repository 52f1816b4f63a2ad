"""How a decoder of the Llama family is divided between the ranks of a group.

A rank computes the attention of some KV heads with their query heads, and some rows of every matrix. Where the KV heads
of a host do not divide evenly between its ranks, each computes as much of its attention as the others: they all read
its blocks. No sum is divided: a rank computes each of its sums as a whole, from inputs that the ranks share. So a group
computes the bits of one process, whatever its size, and shares may differ in size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.decoders.ranks.place import RankPlace, ShareSpan, of_hosts, refuse_small
from gpu_worker.models.packed.packed_weights import FORMATS, NativeMatrix
from gpu_worker.models.packed.packing import GROUP_ROWS
from octavo.request.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class LlamaShare:
    kv_heads: ShareSpan  # the own ones, or those of the host whose attention its ranks share
    queries: ShareSpan  # heads of the own products, as those of keys and values
    keys: ShareSpan
    values: ShareSpan
    hidden: ShareSpan
    inner: ShareSpan
    expert_inner: ShareSpan  # of each expert
    shared_inner: ShareSpan  # of the one that all tokens ask
    vocab: ShareSpan
    layers: ShareSpan

    @classmethod
    def of(cls, config: LlamaConfig, place: RankPlace) -> Self:
        """InvalidArgument if some rank would have no rows, or no layers."""
        size = place.ranks_of_stage
        stage, rank = divmod(place.rank, size)
        inner = inner_sizes(config)
        share = cls(
            **_heads(config, place),
            hidden=ShareSpan.of(config.hidden_size, rank, size, GROUP_ROWS),
            **{name: ShareSpan.of(total, rank, size, GROUP_ROWS) for name, total in inner.items()},
            vocab=ShareSpan.of(config.vocab_size, place.rank, place.size, GROUP_ROWS),
            layers=ShareSpan.of(config.num_layers, stage, place.stages),
        )
        divided = ["hidden", "vocab", *(name for name, total in inner.items() if total)]
        refuse_small(place, config.num_layers, share.layers, [getattr(share, name) for name in divided])
        return share

    def rows(self, config: LlamaConfig) -> dict[str, list[ShareSpan]]:
        """The rows of each matrix of a layer, and of the output projection, by our names."""
        dim = config.head_dim
        queries, keys, _ = config.qkv_rows
        starts = ((self.queries, 0), (self.keys, queries), (self.values, queries + keys))
        return {
            "qkv": [ShareSpan(start + own.first * dim, own.num * dim) for own, start in starts],
            "out": [self.hidden],
            "gate_up": _twice(self.inner, config.intermediate_size),
            "down": [self.hidden],
            "head": [self.vocab],
            "expert_down": [self.hidden],
            "shared_down": [self.hidden],
            **self._rows_of_experts(config),
        }

    def _rows_of_experts(self, config: LlamaConfig) -> dict[str, list[ShareSpan]]:
        if config.experts is None:
            return {}
        return {
            "expert_gate_up": _twice(self.expert_inner, config.experts.inner),
            "shared_gate_up": _twice(self.shared_inner, config.experts.shared_inner),
        }

    def cut(
        self, tensors: Mapping[str, Tensor | NativeMatrix], config: LlamaConfig, extension: Any
    ) -> dict[str, Tensor | NativeMatrix]:
        """The decoder's tensors by our names, of matrices and biases the own rows. They refer to the same memory."""
        rows = self.rows(config)
        cut: dict[str, Tensor | NativeMatrix] = {}
        stacks: dict[str, list[NativeMatrix]] = {}
        for name in sorted(tensors):  # `0.qkv` before `0.qkv.1`
            tensor, (whole, stem) = tensors[name], stack_of(name)
            if isinstance(tensor, NativeMatrix) and stem in rows:
                stacks.setdefault(whole, []).append(tensor)
            elif isinstance(tensor, Tensor) and stem.removesuffix("_bias") in rows:  # of experts: a row for each
                spans = rows[stem.removesuffix("_bias")]
                cut[name] = torch.cat([tensor[..., span.first : span.first + span.num] for span in spans], dim=-1)
            else:
                cut[name] = tensor
        if "head" not in stacks and isinstance(embedding := tensors["embedding"], NativeMatrix):
            stacks["head"] = [embedding]
        for name, parts in stacks.items():
            for number, part in enumerate(rows_of(parts, rows[stack_of(name)[1]], extension)):
                cut[f"{name}.{number}" if number else name] = part
        return cut

    def extension_argument(
        self, place: RankPlace, extension: Any, sizes: dict[str, Any], config: LlamaConfig
    ) -> dict[str, Any]:
        plan_bytes = place.plan_bytes(config.context_tokens)
        team = place.team(place.team_memory(extension.Llama.team_bytes(sizes, place.tokens, plan_bytes)))
        heads = {"queries": self.queries, "keys": self.keys, "values": self.values}
        argument = {
            "team": team,
            "tokens": place.tokens,
            "plan_bytes": plan_bytes,
            "kv_heads": tuple(self.kv_heads),
            "heads": [] if heads == _whole_heads(config, self.kv_heads) else [tuple(span) for span in heads.values()],
            "hidden": tuple(self.hidden),
            "inner": tuple(self.inner),
            "expert_inner": tuple(self.expert_inner),
            "shared_inner": tuple(self.shared_inner),
            "vocab": tuple(self.vocab),
            "layers": tuple(self.layers),
        }
        if place.hosts > 1:
            shares = of_hosts(place, partial(LlamaShare.of, config))
            names = ("hidden", "inner", "expert_inner", "shared_inner", "vocab")
            argument["hosts"] = place.group_hosts(team, shares)
            argument |= {f"host_{name}": [tuple(getattr(each, name)) for each in shares] for name in names}
        return argument


def inner_sizes(config: LlamaConfig) -> dict[str, int]:
    """How long inner states of a model's MLPs are, by the names of shares; 0: it has none of the kind."""
    experts = config.experts
    dense = experts is None or not all(config.expert_layers)
    return {
        "inner": config.intermediate_size if dense else 0,
        "expert_inner": 0 if experts is None else experts.inner,
        "shared_inner": 0 if experts is None else experts.shared_inner,
    }


def _whole_heads(config: LlamaConfig, kv_heads: ShareSpan) -> dict[str, ShareSpan]:
    """Of the products of some KV heads."""
    group = config.num_heads // config.num_kv_heads
    queries = ShareSpan(kv_heads.first * group, kv_heads.num * group)
    return {"queries": queries, "keys": kv_heads, "values": kv_heads}


def _heads(config: LlamaConfig, place: RankPlace) -> dict[str, ShareSpan]:
    """Of attention, and of the products before it. Where ranks do not have whole KV heads, they divide the heads of
    queries, keys and values, of which those of a KV head are neighbours.
    """
    here, rank = min(place.ranks_of_stage, place.ranks_of_host), place.rank % place.ranks_of_stage
    host = ShareSpan.of(config.num_kv_heads, rank // here, place.ranks_of_stage // here)
    if host.num % here == 0 or place.has_device:
        own = ShareSpan.of(config.num_kv_heads, rank, place.ranks_of_stage)
        return {"kv_heads": own, **_whole_heads(config, own)}
    group = config.num_heads // config.num_kv_heads
    part = ShareSpan.of(host.num * (group + 2), rank % here, here)

    def before(heads: int) -> tuple[int, int, int]:
        whole, rest = divmod(heads, group + 2)
        return (host.first + whole) * group + min(rest, group), host.first + whole + (rest > group), host.first + whole

    ends = zip(before(part.first), before(part.first + part.num), strict=True)
    queries, keys, values = (ShareSpan(first, end - first) for first, end in ends)
    return {"kv_heads": host, "queries": queries, "keys": keys, "values": values}


def _twice(span: ShareSpan, total: int) -> list[ShareSpan]:
    """Of a gate, and of what it gates, which lies below it."""
    return [ShareSpan(0, 2 * total)] if span.num == total else [span, ShareSpan(total + span.first, span.num)]


def stack_of(name: str) -> tuple[str, str]:
    """A matrix's stack, and what it is: `0.qkv` and `qkv` of `0.qkv.1`, and `expert_down` for each expert's."""
    layer, dot, rest = name.partition(".")
    if not dot:
        return name, name
    stem, *numbers = rest.split(".")
    return (name, f"expert_{numbers[-1]}") if stem == "experts" else (f"{layer}.{stem}", stem)


def rows_of(parts: Sequence[NativeMatrix], spans: Sequence[ShareSpan], extension: Any) -> list[NativeMatrix]:
    """Some rows of matrices that lie one below the other, as matrices in the same memory."""
    found = []
    for span in spans:
        start = 0
        for part in parts:
            first, end = max(span.first, start), min(span.first + span.num, start + part.weight.rows)
            if first < end:
                found.append(_rows(part, first - start, end - first, extension))
            start += part.weight.rows
    return found


def _rows(matrix: NativeMatrix, first: int, count: int, extension: Any) -> NativeMatrix:
    weight = matrix.weight
    if (first, count) == (0, weight.rows):
        return matrix
    if weight.format in FORMATS.values():
        data = matrix.data[first : first + count]
    elif first % GROUP_ROWS:
        raise InvalidArgument(
            "tensor_parallel", f"shares would begin within {GROUP_ROWS} rows that are packed together: leave it out"
        )
    else:
        group_bytes = len(matrix.data) // -(-weight.rows // GROUP_ROWS)
        data = matrix.data[first // GROUP_ROWS * group_bytes : -(-(first + count) // GROUP_ROWS) * group_bytes]
    return NativeMatrix(data, extension.Weight(data, weight.format, count, weight.cols, inputs=weight.inputs))
