"""What a rank is told at its start, and what it says: a line of JSON each."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from gpu_worker.group.shared_memory import SharedMemory
from gpu_worker.models.decoders.ranks.place import RankPlace

BEATS_PER_LEASE = 8
LEFT_TO_FRONT = ("swap_bytes", "generation_config", "name", "adapter_bytes")  # options that ranks have no use for
STATM = Path("/proc/self/statm")  # the second number: pages in memory


def options_of_ranks(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `load_runner` for a rank other than 0."""
    told = {name: x for name, x in options.items() if name not in LEFT_TO_FRONT}
    return {"model": model, **told, "swap_bytes": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A dataclass that is a line of JSON."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask(_Line):
    """What a rank of a group has to know. `options` are those of `load_runner`, the model's name among them."""

    rank: int
    size: int
    stages: int = 1
    host: int = 0  # the hosts have equally many ranks each, neighbours
    hosts: int = 1
    links: Sequence[int] = ()  # in the first rank of a host: the descriptors of its streams to the others, by host
    meeting: int = -1  # see RankPlace
    rehearsal: str = ""
    pipes: Sequence[int] = ()
    team: int  # the descriptors of the memory of all ranks
    arena: int
    adapters: int = -1  # -1: none run
    adapter_bytes: int = 0
    tokens: int
    sequences: int
    patience_s: float
    options: Mapping[str, Any]

    @property
    def beat_s(self) -> float:
        """How often a rank says that it lives."""
        return self.patience_s / BEATS_PER_LEASE

    @property
    def descriptors(self) -> list[int]:
        """What the process of the rank inherits."""
        return [
            self.team,
            self.arena,
            *self.pipes,
            *(each for each in (self.adapters, self.meeting, *self.links) if each >= 0),
        ]

    def place(self, on_team: Callable[[Any], None] = lambda team: None) -> RankPlace:
        return RankPlace(
            rank=self.rank,
            size=self.size,
            stages=self.stages,
            host=self.host,
            hosts=self.hosts,
            links=self.links,
            meeting=self.meeting,
            rehearsal=self.rehearsal,
            pipes=self.pipes,
            on_team=on_team,
            tokens=self.tokens,
            sequences=self.sequences,
            block_size=self.options["block_size"],
            patience_s=self.patience_s,
            team_memory=SharedMemory(self.team).map,
            arena_memory=SharedMemory(self.arena).map,
            adapter_memory=self._adapter_memory if self.adapters >= 0 else None,
        )

    def _adapter_memory(self) -> Tensor:
        return SharedMemory(self.adapters).map(self.adapter_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUsage:
    """What a rank uses, as it says from time to time."""

    memory_bytes: int
    cpu_s: float
    waited_s: float

    @classmethod
    def of_this_process(cls, waited_s: float) -> Self:
        pages = int(STATM.read_text().split()[1]) if STATM.exists() else 0
        return cls(memory_bytes=pages * os.sysconf("SC_PAGE_SIZE"), cpu_s=time.process_time(), waited_s=waited_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWord(_Line):
    """What a rank says: that it is ready and what it computes, why it cannot, what it uses, or a line for the log."""

    rank: int
    has_loaded: bool = False  # its model, and waits for others before it is ready
    numerics: str = ""  # it is ready
    host: str = ""  # its name
    pid: int = 0
    num_blocks: int = 0
    failure: str = ""  # it is not, and ends
    usage: Mapping[str, Any] | None = None  # it lives: a RankUsage
    level: int = 0  # of a line for the log
    line: str = ""
