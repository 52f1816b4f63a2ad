"""How a decoder of the Llama family is divided between the ranks of a group.

A rank computes the attention of some KV heads with their query heads, and some rows of every matrix. No sum is divided:
a rank computes each of its sums as a whole, from inputs that the ranks share. So a group computes the bits of one
process, whatever its size, and shares may differ in size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.packed.packed_weights import FORMATS, NativeMatrix
from gpu_worker.models.packed.packing import GROUP_ROWS
from gpu_worker.ops import native
from octavo.request.errors import InvalidArgument

PLAN_BYTES_PER_TOKEN = 48  # id, position, slot, and row twice: sampled and scored; and what fills lines
PLAN_BYTES = 4096


class ShareSpan(NamedTuple):
    first: int
    num: int

    @classmethod
    def of(cls, total: int, rank: int, size: int, unit: int = 1) -> Self:
        """The part of a rank: shares differ by a unit at most, and begin at multiples of it."""
        units = -(-total // unit)
        first, end = (min(total, units * place // size * unit) for place in (rank, rank + 1))
        return cls(first, end - first)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank stands in its group, and the memory of the group: as many bytes as asked for, in each rank the same.

    A step has at most so many tokens and sequences.
    """

    rank: int
    size: int
    tokens: int
    sequences: int
    stages: int = 1  # equally many ranks each, neighbours, compute the same layers
    host: int = 0  # equally many ranks each are on a host, neighbours
    hosts: int = 1
    links: Sequence[int] = ()  # in the first rank of a host: the descriptors of its streams to the others, by host
    block_size: int
    patience_s: float  # how long a rank that does not come is waited for
    team_memory: Callable[[int], Tensor]
    arena_memory: Callable[[int], Tensor]

    @property
    def ranks_of_host(self) -> int:
        return self.size // self.hosts

    @property
    def ranks_of_stage(self) -> int:
        return self.size // self.stages

    def team(self, memory: Tensor | None = None) -> Any:
        """The extension's, of the ranks on this host. Without memory it is that which a rank has mapped already."""
        if memory is None:
            memory = self.team_memory(0)
        extension: Any = native.load()
        return extension.Team(memory, self.rank % self.ranks_of_host, self.ranks_of_host, self.patience_s, self.stages)

    def plan_bytes(self, context_tokens: int) -> int:
        """How many bytes the largest step has, without its activations."""
        table = -(-context_tokens // self.block_size) + 1
        return PLAN_BYTES + self.tokens * PLAN_BYTES_PER_TOKEN + self.sequences * (4 * table + 8)


def refuse_undivided(config: LlamaConfig) -> None:
    """InvalidArgument for a model of the family that no group runs."""
    if config.experts is not None:
        raise InvalidArgument("tensor_parallel", "models with experts are not divided between ranks: leave it out")


@dataclass(frozen=True, slots=True)
class LlamaShare:
    kv_heads: ShareSpan
    hidden: ShareSpan
    inner: ShareSpan
    vocab: ShareSpan
    layers: ShareSpan

    @classmethod
    def of(cls, config: LlamaConfig, place: RankPlace) -> Self:
        """InvalidArgument if some rank would have no rows, or no layers."""
        size = place.ranks_of_stage
        stage, rank = divmod(place.rank, size)
        share = cls(
            kv_heads=ShareSpan.of(config.num_kv_heads, rank, size),
            hidden=ShareSpan.of(config.hidden_size, rank, size, GROUP_ROWS),
            inner=ShareSpan.of(config.intermediate_size, rank, size, GROUP_ROWS),
            vocab=ShareSpan.of(config.vocab_size, place.rank, place.size, GROUP_ROWS),
            layers=ShareSpan.of(config.num_layers, stage, place.stages),
        )
        if not share.layers.num:
            raise InvalidArgument(
                "pipeline_parallel", f"this model has {config.num_layers} layers: give no more stages"
            )
        if not all(span.num for span in (share.hidden, share.inner, share.vocab)):
            raise InvalidArgument("tensor_parallel", f"this model is too small for {place.size} ranks: give fewer")
        return share

    def rows(self, config: LlamaConfig) -> dict[str, list[ShareSpan]]:
        """The rows of each matrix of a layer, and of the output projection, by our names."""
        dim, inner = config.head_dim, self.inner
        group = config.num_heads // config.num_kv_heads
        queries, keys, _ = config.qkv_rows
        own = ShareSpan(self.kv_heads.first * dim, self.kv_heads.num * dim)
        return {
            "qkv": [
                ShareSpan(own.first * group, own.num * group),
                ShareSpan(queries + own.first, own.num),
                ShareSpan(queries + keys + own.first, own.num),
            ],
            "out": [self.hidden],
            "gate_up": [inner, ShareSpan(config.intermediate_size + inner.first, inner.num)],
            "down": [self.hidden],
            "head": [self.vocab],
        }

    def cut(
        self, tensors: Mapping[str, Tensor | NativeMatrix], config: LlamaConfig, extension: Any
    ) -> dict[str, Tensor | NativeMatrix]:
        """The decoder's tensors by our names, of matrices and biases the own rows. They refer to the same memory."""
        rows = self.rows(config)
        cut: dict[str, Tensor | NativeMatrix] = {}
        stacks: dict[str, list[NativeMatrix]] = {}
        for name in sorted(tensors):  # `0.qkv` before `0.qkv.1`
            tensor, (layer, stem) = tensors[name], _layer_and_stem(name)
            if isinstance(tensor, NativeMatrix) and stem in rows:
                stacks.setdefault(f"{layer}{stem}", []).append(tensor)
            elif isinstance(tensor, Tensor) and stem.removesuffix("_bias") in rows:
                spans = rows[stem.removesuffix("_bias")]
                cut[name] = torch.cat([tensor[span.first : span.first + span.num] for span in spans])
            else:
                cut[name] = tensor
        if "head" not in stacks and isinstance(embedding := tensors["embedding"], NativeMatrix):
            stacks["head"] = [embedding]
        for name, parts in stacks.items():
            for number, part in enumerate(rows_of(parts, rows[_layer_and_stem(name)[1]], extension)):
                cut[f"{name}.{number}" if number else name] = part
        return cut

    def extension_argument(self, place: RankPlace, extension: Any, sizes: dict[str, Any], config: LlamaConfig) -> Any:
        plan_bytes = place.plan_bytes(config.context_tokens)
        team = place.team(place.team_memory(extension.Llama.team_bytes(sizes, place.tokens, plan_bytes)))
        argument = {
            "team": team,
            "tokens": place.tokens,
            "plan_bytes": plan_bytes,
            "kv_heads": tuple(self.kv_heads),
            "hidden": tuple(self.hidden),
            "inner": tuple(self.inner),
            "vocab": tuple(self.vocab),
            "layers": tuple(self.layers),
        }
        if place.hosts > 1:
            unused = [-1 if host == place.host else 0 for host in range(place.hosts)]  # other ranks send nothing
            links = list(place.links) or unused
            argument |= {"links": extension.HostLinks(team, links, place.host), **self._spans_of_hosts(place, config)}
        return argument

    @classmethod
    def _spans_of_hosts(cls, place: RankPlace, config: LlamaConfig) -> dict[str, list[tuple[int, int]]]:
        """What the ranks of each host have together."""
        spans: dict[str, list[tuple[int, int]]] = {}
        for first in range(0, place.size, place.ranks_of_host):
            ends = [cls.of(config, replace(place, rank=rank)) for rank in (first, first + place.ranks_of_host - 1)]
            for name in ("kv_heads", "hidden", "inner", "vocab"):
                begin, last = (getattr(share, name) for share in ends)
                spans.setdefault(f"host_{name}", []).append((begin.first, last.first + last.num - begin.first))
        return spans


def _layer_and_stem(name: str) -> tuple[str, str]:
    """`0.` and `qkv` of `0.qkv.1`."""
    layer, dot, rest = name.partition(".")
    return (f"{layer}.", rest.partition(".")[0]) if dot else ("", name)


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
    return NativeMatrix(data, extension.Weight(data, weight.format, count, weight.cols, exact=weight.exact))
