"""What `embed` and `score` take and return: plain values by the names that vLLM has for them."""

from dataclasses import dataclass

from octavo.request.errors import Failure


@dataclass(frozen=True, slots=True)
class OfflinePoolingParams:
    """How a vector is made. What is None follows from the model's files."""

    dimensions: int | None = None  # so many leading numbers, normalized after the cut
    normalize: bool | None = None
    pooling: str | None = None  # "last" or "mean"


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The vector of one prompt. `failure` is set if there is none; other prompts are not affected."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    failure: Failure | None = None
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """How well one pair of texts fits. `failure` is set if there is no score."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    failure: Failure | None = None
    finished: bool = True
