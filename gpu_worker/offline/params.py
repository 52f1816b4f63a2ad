"""The parameters of an offline request, by the names of octavo and of vLLM.

`gpu_worker.SamplingParams` is `OfflineParams`: an object that a program may change, checked when it is made and again
when it is used. The engine knows octavo.request.sampling.SamplingParams only, whose table has most of the fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any, Self, Unpack

from gpu_worker.offline.absent import BEAM_ARGUMENTS, PARAMS_ARGUMENTS, refusing
from gpu_worker.offline.outputs import RequestOutputKind
from gpu_worker.offline.structured import StructuredOutputsParams
from octavo.request import limits, sampling_validation
from octavo.request.errors import InvalidArgument, Unimplemented
from octavo.request.sampling import PARAMETERS, Constraint, Parameter, SamplingArguments, SamplingParams


class OfflineArguments(SamplingArguments, total=False):
    """The keyword arguments of OfflineParams: those of octavo, and those that only vLLM has."""

    include_stop_str_in_output: bool
    detokenize: bool
    truncate_prompt_tokens: int | None
    bad_words: str | Sequence[str] | None
    structured_outputs: StructuredOutputsParams | None
    use_beam_search: bool
    thinking_token_budget: int | None
    output_kind: RequestOutputKind


_FLAGS = {  # of vLLM, and their defaults
    "include_stop_str_in_output": False,  # vLLM's name of include_stop
    "detokenize": True,  # False: outputs have token ids and no text
    "use_beam_search": False,  # best_of (or n) beams, of which n are returned
}
_OWN = {
    **_FLAGS,
    "truncate_prompt_tokens": None,  # keeps the last tokens of the prompt; -1: as many as fit the context
    "structured_outputs": None,  # vLLM's form of `constraint`
    "thinking_token_budget": None,  # vLLM's name of thinking_budget
    "output_kind": RequestOutputKind.CUMULATIVE,  # of LLMEngine and AsyncLLM; an LLM returns whole answers
    "bad_words": None,  # texts that no output contains, with or without a space before them
}
# The order of vLLM, for those who give values without their names.
_FIRST = (
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens",
)  # fmt: skip


class _CheckedParams:
    """How tokens are chosen and when generation ends. docs/sampling.md says which values are allowed.

    Raises InvalidArgument, which is a ValueError, for a value that no model allows; TypeError for a name that does not
    exist; Unimplemented for a parameter of vLLM that octavo does not have.
    """

    __slots__ = ()
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __post_init__(self) -> None:
        self.check_values()

    def check_values(self) -> None:
        """Raises InvalidArgument for a value that no model allows."""
        for name in (*_FLAGS, "include_stop"):
            if type(getattr(self, name)) is not bool:
                raise InvalidArgument(name, "must be true or false")
        if self.output_kind not in list(RequestOutputKind):
            raise InvalidArgument("output_kind", "must be RequestOutputKind.CUMULATIVE, DELTA or FINAL_ONLY")
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
        return _texts("bad_words", self.bad_words)

    def to_sampling(self, banned: Sequence[Sequence[int]] = ()) -> SamplingParams:
        """The parameters as the engine knows them. `banned` are the tokens of `bad_words`, in each form."""
        values = {name: _plain(row, getattr(self, name)) for name, row in PARAMETERS.items()}
        values["include_stop"] = self.include_stop_str_in_output or self.include_stop
        values["banned_token_ids"] += tuple(token_ids[0] for token_ids in banned if len(token_ids) == 1)
        values["banned_sequences"] += tuple(tuple(token_ids) for token_ids in banned if len(token_ids) > 1)
        if self.thinking_token_budget is not None:
            values["thinking_budget"] = self._budget()
        if self.structured_outputs is not None:
            values["constraint"] = self._structured()
        if self.use_beam_search:
            values |= {"beam_width": self.beam_width or self.best_of or self.n, "best_of": 0}
        return SamplingParams(**values)

    def _budget(self) -> Any:
        if self.thinking_budget is not None:
            raise InvalidArgument("thinking_token_budget", "thinking_budget is given, too; leave one of them out")
        return self.thinking_token_budget

    def _structured(self) -> Constraint:
        if self.constraint is not None:
            raise InvalidArgument("structured_outputs", "constraint is given, too; leave one of them out")
        given = self.structured_outputs
        if not isinstance(given, StructuredOutputsParams):
            raise InvalidArgument("structured_outputs", "must be StructuredOutputsParams")
        return given.to_constraint()

    @classmethod
    def of(cls, params: SamplingParams) -> Self:
        """The same parameters, as an object that a program may change."""
        values = {name: getattr(params, name) for name in PARAMETERS}
        if params.max_tokens is None:
            del values["max_tokens"]  # there None means the default
        return cls(**values)


def _default(row: Parameter) -> Any:
    """A list is None, as vLLM has it, and so is best_of: as many as n."""
    if row.name == "max_tokens":
        return limits.DEFAULT_MAX_TOKENS  # None: all that the prompt leaves of the context
    return None if row.most is not None or row.name == "best_of" else row.default


def _plain(row: Parameter, value: Any) -> Any:
    """A value as the engine knows it."""
    match row.name, value:
        case (("top_k" | "seed"), -1):
            return row.default  # vLLM's way to say that there is none
        case "best_of", None:
            return 0
        case "max_tokens", None:
            return limits.U32_MAX
        case (("logprobs" | "prompt_logprobs"), True):
            return 1
        case "logit_bias", _:
            return {} if value is None else value
        case "stop", _:
            return _texts("stop", value)
        case "banned_sequences", _:
            return tuple(tuple(each) if isinstance(each, list) else each for each in _listed(row.name, value))
    return _listed(row.name, value) if row.most is not None else value


if TYPE_CHECKING:

    class OfflineParams(_CheckedParams):
        def __init__(self, *values: Any, **given: Unpack[OfflineArguments]) -> None: ...

else:
    _DEFAULTS = {name: _default(PARAMETERS[name]) for name in dict.fromkeys((*_FIRST, *PARAMETERS))} | _OWN
    OfflineParams = refusing("SamplingParams", PARAMS_ARGUMENTS)(
        make_dataclass(
            "OfflineParams",
            [(name, Any, field(default=default)) for name, default in _DEFAULTS.items()],
            bases=(_CheckedParams,),
            namespace={"__module__": __name__, "__doc__": _CheckedParams.__doc__},
            slots=True,
        )
    )


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
