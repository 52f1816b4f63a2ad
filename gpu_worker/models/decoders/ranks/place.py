"""Where a rank stands in its group, and which part of something is its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from gpu_worker.ops import native
from octavo.request.errors import InvalidArgument

PLAN_BYTES_PER_TOKEN = 56  # id, position, slot, and row thrice: sampled, scored, adapted; and what fills lines
PLAN_BYTES = 4096
ADAPTER_PLAN_BYTES = 24  # number, place and tokens


class TeamBroken(RuntimeError):
    """A rank has ended or hangs, or another host has."""


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
    adapter_memory: Callable[[], Tensor] | None = None  # None: no adapter runs in the group
    # Of ranks with a device each: the descriptor of a file by which they find each other; -1: they share memory.
    meeting: int = -1
    rehearsal: str = ""  # of those: the ops with which CPUs pretend to be their devices; empty: they are GPUs
    pipes: Sequence[int] = ()  # of those: rank 0 tells each other one by a pipe which blocks to copy beside the steps
    on_team: Callable[[Any], None] = lambda team: None  # is told of the rank's team, when that waits for others next

    @property
    def has_device(self) -> bool:
        """Whether this rank computes on a device of its own, and has its own heads of each block there."""
        return self.meeting >= 0

    @property
    def device(self) -> str:
        """Of a rank that has one of its own."""
        return "cpu" if self.rehearsal else f"cuda:{self.rank}"

    @property
    def ranks_of_host(self) -> int:
        return self.size // self.hosts

    @property
    def ranks_of_stage(self) -> int:
        return self.size // self.stages

    @property
    def stages_here(self) -> int:
        """A host has some whole stages, or part of one."""
        return max(1, self.stages // self.hosts)

    def team(self, memory: Tensor | None = None) -> Any:
        """The extension's, of the ranks on this host. Without memory it is that which a rank has mapped already."""
        if memory is None:
            memory = self.team_memory(0)
        extension: Any = native.load()
        rank, size = self.rank % self.ranks_of_host, self.ranks_of_host
        return extension.Team(memory, rank, size, self.patience_s, self.stages_here)

    def group_hosts(self, team: Any, shares: Sequence[Any]) -> Any:
        """The extension's, with what the ranks of each host have together (`of_hosts`)."""
        extension: Any = native.load()
        unused = [-1 if host == self.host else 0 for host in range(self.hosts)]  # of ranks that send nothing
        kv_heads, layers = ([tuple(getattr(each, name)) for each in shares] for name in ("kv_heads", "layers"))
        return extension.GroupHosts(team, list(self.links) or unused, self.host, kv_heads, layers)

    def plan_bytes(self, context_tokens: int) -> int:
        """How many bytes the largest step has, without its activations."""
        table = -(-context_tokens // self.block_size) + 1
        return PLAN_BYTES + self.tokens * PLAN_BYTES_PER_TOKEN + self.sequences * (4 * table + 8 + ADAPTER_PLAN_BYTES)


def of_hosts(place: RankPlace, share_of: Callable[[RankPlace], Any]) -> list[Any]:
    """What the ranks of each host have together, as the dataclass of spans that the share of a rank is."""
    found = []
    for first in range(0, place.size, place.ranks_of_host):
        begin, last = (share_of(replace(place, rank=rank)) for rank in (first, first + place.ranks_of_host - 1))
        ends = {each.name: (getattr(begin, each.name), getattr(last, each.name)) for each in fields(begin)}
        spans = {name: ShareSpan(one.first, end.first + end.num - one.first) for name, (one, end) in ends.items()}
        found.append(replace(begin, **spans))
    return found


def cut_rows(tensor: Tensor, spans: Sequence[ShareSpan]) -> Tensor:
    """Those rows of a tensor, in the same memory where they are neighbours there."""
    parts = [tensor[span.first : span.first + span.num] for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def refuse_small(place: RankPlace, num_layers: int, layers: ShareSpan, rows: Sequence[ShareSpan]) -> None:
    """InvalidArgument if a rank has no layers, or none of some rows."""
    if not layers.num:
        raise InvalidArgument("pipeline_parallel", f"this model has {num_layers} layers: give no more stages")
    if not all(span.num for span in rows):
        raise InvalidArgument("tensor_parallel", f"this model is too small for {place.size} ranks: give fewer")
