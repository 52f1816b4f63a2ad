"""Sampling parameters as plain values. The wire form is octavo.v1.SamplingParams; octavo.wire converts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType


class FinishReason(IntEnum):
    """Why a branch ended; NONE while it runs. The values are those of octavo.v1.FinishReason."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. `sampling_validation` says which values are allowed."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    best_of: int = 0  # 0: as many as n
    max_tokens: int | None = None  # None: what the prompt leaves of the context, at most 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # runs of tokens that no output contains
    seed: int | None = None
    logprobs: int | None = None  # likeliest tokens reported beside each chosen one; None: no log probabilities at all
    prompt_logprobs: int | None = None
    beam_width: int = 0  # 0: no beam search
    length_penalty: float = 1.0
    skip_special_tokens: bool = True

    @property
    def num_branches(self) -> int:
        """How many branches are journalled. A beam search journals its n best outputs, at its end."""
        return self.n if self.beam_width else max(self.n, self.best_of)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def ranked(self) -> bool:
        """Whether branches are ranked. Then no branch is delivered before all have ended."""
        return self.beam_width > 0 or self.best_of > self.n


@dataclass(slots=True, frozen=True)
class TokenScore:
    """The log probability of a token and the likeliest tokens beside it, after the request's adjustments of logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    raw: float | None = None  # before adjustments, if there are any and branches are ranked

    @property
    def rank_logprob(self) -> float:
        """The log probability that ranking sums: the one before adjustments.

        A replay scores tokens that are known already, without adjustments, and must come to the same sum.
        """
        return self.logprob if self.raw is None else self.raw
