"""The parameters of an offline request, by the names of octavo and of vLLM.

`gpu_worker.SamplingParams` is `OfflineParams`: an object that a program may change, checked when it is made and again
when it is used. The engine knows octavo.request.sampling.SamplingParams only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gpu_worker.offline.absent import BEAM_ARGUMENTS, PARAMS_ARGUMENTS, refusing
from octavo.request import limits, sampling_validation
from octavo.request.errors import InvalidArgument, Unimplemented
from octavo.request.sampling import SamplingParams

_SAME = (  # fields that mean the same in both
    *("temperature", "top_p", "min_p", "n", "min_tokens", "ignore_eos", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "length_penalty", "skip_special_tokens"),
)


@refusing("SamplingParams", PARAMS_ARGUMENTS)
@dataclass(slots=True)
class OfflineParams:
    """How tokens are chosen and when generation ends. octavo.request.limits says which values are allowed.

    Raises InvalidArgument, which is a ValueError, for a value that no model allows; TypeError for a name that does not
    exist; Unimplemented for a parameter of vLLM that octavo does not have.
    """

    n: int = 1
    best_of: int | None = None  # None or 0: as many as n
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None  # None or -1: drawn from the seed of the LLM
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = limits.DEFAULT_MAX_TOKENS  # None: all that the prompt leaves of the context
    min_tokens: int = 0
    logprobs: int | None = None  # likeliest tokens reported beside each chosen one; True is 1
    prompt_logprobs: int | None = None
    detokenize: bool = True  # False: outputs have token ids and no text
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    include_stop: bool = False  # octavo's name of include_stop_str_in_output
    truncate_prompt_tokens: int | None = None  # keeps the last tokens of the prompt; -1: as many as fit the context
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] | None = None
    banned_sequences: Sequence[Sequence[int]] | None = None
    bad_words: Sequence[str] | None = None  # texts that no output contains, with or without a space before them
    use_beam_search: bool = False  # best_of (or n) beams, of which n are returned
    beam_width: int = 0  # octavo's way to say the same
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        self.check_values()

    def check_values(self) -> None:
        """Raises InvalidArgument for a value that no model allows."""
        for name in ("detokenize", "use_beam_search", "include_stop", "include_stop_str_in_output"):
            if type(getattr(self, name)) is not bool:
                raise InvalidArgument(name, "must be true or false")
        truncated = self.truncate_prompt_tokens
        if truncated is not None and not (type(truncated) is int and (truncated >= 1 or truncated == -1)):
            raise InvalidArgument("truncate_prompt_tokens", "must be a whole number from 1 on, or -1 for what fits")
        if not self.detokenize and self.stop:
            raise InvalidArgument("stop", "stop strings are found in text; leave out detokenize=False")
        for i, word in enumerate(self.words):
            if not word.strip():
                raise InvalidArgument("bad_words", f"entry {i} must be a string that is not empty")
        sampling_validation.validate_sampling(self.to_sampling(), vocab_size=limits.U32_MAX)

    @property
    def words(self) -> tuple[str, ...]:
        """The bad words as a list."""
        return _texts("bad_words", self.bad_words)

    def to_sampling(self, banned: Sequence[Sequence[int]] = ()) -> SamplingParams:
        """The parameters as the engine knows them. `banned` are the tokens of `bad_words`, in each form."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        values |= {
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "seed": None if self.seed == -1 else self.seed,
            "best_of": 0 if self.best_of is None else self.best_of,
            "max_tokens": limits.U32_MAX if self.max_tokens is None else self.max_tokens,
            "beam_width": self.beam_width,
            "stop": _texts("stop", self.stop),
            "stop_token_ids": _listed("stop_token_ids", self.stop_token_ids),
            "include_stop": self.include_stop_str_in_output or self.include_stop,
            "logit_bias": {} if self.logit_bias is None else self.logit_bias,
            "allowed_token_ids": _listed("allowed_token_ids", self.allowed_token_ids),
            "banned_token_ids": (
                *_listed("banned_token_ids", self.banned_token_ids),
                *(token_ids[0] for token_ids in banned if len(token_ids) == 1),
            ),
            "banned_sequences": (
                *(
                    tuple(token_ids) if isinstance(token_ids, list) else token_ids
                    for token_ids in _listed("banned_sequences", self.banned_sequences)
                ),
                *(tuple(token_ids) for token_ids in banned if len(token_ids) > 1),
            ),
            "logprobs": 1 if self.logprobs is True else self.logprobs,
            "prompt_logprobs": 1 if self.prompt_logprobs is True else self.prompt_logprobs,
        }
        if self.use_beam_search:
            values |= {"beam_width": self.beam_width or self.best_of or self.n, "best_of": 0}
        return SamplingParams(**values)

    @classmethod
    def of(cls, params: SamplingParams) -> "OfflineParams":
        """A copy of the parameters that a program may change."""
        values = {field.name: getattr(params, field.name) for field in fields(params)}
        if params.max_tokens is None:
            del values["max_tokens"]  # there None means the default
        return cls(**values)


@refusing("BeamSearchParams", BEAM_ARGUMENTS)
@dataclass(slots=True)
class BeamSearchParams:
    """The parameters of LLM.beam_search. Every sequence found is returned, the best first."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # 0 or 1: a beam search draws no tokens
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self.to_params()

    def to_params(self) -> OfflineParams:
        """The parameters with which `generate` makes the same search. Raises InvalidArgument, or Unimplemented."""
        if self.temperature not in (0, 1):
            raise Unimplemented(f"temperature={self.temperature}: a beam search draws no tokens; leave it out")
        common = OfflineParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=min(2 * self.beam_width, limits.MAX_LOGPROBS),
        )
        if self.beam_width == 1:  # the one beam follows the likeliest token
            common.temperature = 0.0
        else:
            common.beam_width = self.beam_width
        common.check_values()
        return common


def _listed(name: str, values: object) -> tuple[Any, ...]:
    """The values of a list that may be missing."""
    if values is None:
        return ()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence | set | frozenset):
        raise InvalidArgument(name, "must be a list")
    return tuple(values)


def _texts(name: str, values: object) -> tuple[str, ...]:
    """Strings, or one string for a list of one."""
    listed = (values,) if isinstance(values, str) else _listed(name, values)
    for i, text in enumerate(listed):
        if not isinstance(text, str):
            raise InvalidArgument(name, f"entry {i} must be a string that is not empty")
    return listed
