"""What a rank is told at its start, and what it says: a line of JSON each."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from gpu_worker.group.shared_memory import SharedMemory
from gpu_worker.models.decoders.llama_share import RankPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """What a rank of a group has to know. `options` are those of `load_runner`, the model's name among them."""

    rank: int
    size: int
    team: int  # the descriptors of the memory of all ranks
    arena: int
    tokens: int
    sequences: int
    patience_s: float
    options: Mapping[str, Any]

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def place(self) -> RankPlace:
        return RankPlace(
            rank=self.rank,
            size=self.size,
            tokens=self.tokens,
            sequences=self.sequences,
            block_size=self.options["block_size"],
            patience_s=self.patience_s,
            team_memory=SharedMemory(self.team).map,
            arena_memory=SharedMemory(self.arena).map,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWord:
    """What a rank says: that it is ready and what it computes, why it cannot, or a line for the log."""

    numerics: str = ""  # it is ready
    num_blocks: int = 0
    failure: str = ""  # it is not, and ends
    level: int = 0  # of a line for the log
    line: str = ""

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))
