"""The table of sampling parameters. Everything that has a list of them takes it from here.

The fields of SamplingParams are its rows: type, default, range, names elsewhere, and what the parameter does. The
validator, the wire, the fields of HTTP, the parameters of gpu_worker.LLM, what is read of generation_config.json, the
flags of the command line and docs/sampling.md are made of them. Types cannot be: SamplingArguments repeats the names
for type checkers. The wire form is octavo.v1.SamplingParams; octavo.wire converts.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, IntEnum, StrEnum
from types import MappingProxyType
from typing import Any, TypedDict

from octavo.request import limits
from octavo.request.errors import InvalidArgument
from octavo.request.limits import U32_MAX, U64_MAX, NumberRange, integers


class FinishReason(IntEnum):
    """Why a branch ended; NONE while it runs. The values are those of octavo.v1.FinishReason."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5


class Shape(StrEnum):
    """What kind of constraint it is. The values are the names of fields of octavo.v1.Constraint."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"

    @property
    def max_bytes(self) -> int:
        return limits.MAX_REGEX_BYTES if self is Shape.REGEX else limits.MAX_CONSTRAINT_BYTES

    @property
    def is_json(self) -> bool:
        return self in (Shape.JSON_SCHEMA, Shape.CHOICE, Shape.STRUCTURAL_TAG)


@dataclass(frozen=True, slots=True)
class Constraint:
    """`text` is a schema, a structural tag or a list of choices as JSON, an expression, or a grammar."""

    shape: Shape
    text: str = ""  # empty for a JSON object
    # Which library makes the masks, in which version. A router writes it, and no other version may go on.
    engine: str = ""

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Constraint":
        return cls(Shape.CHOICE, json.dumps(list(choices), ensure_ascii=False))


class ParameterKind(Enum):
    """What a parameter acts on."""

    DRAWS = "says how a token is drawn"
    ADJUSTS = "adjusts logits"
    BRANCHES = "says how many outputs there are, and their order"
    ENDS = "says where an output ends"
    REPORTS = "says what is told of an output"


SAME = "the same name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A row of the table. `name` and `default` are those of the field that has it."""

    name: str = ""
    default: Any = None
    kind: ParameterKind
    what: str  # for people, in docs/sampling.md and in the help of the command line
    allowed: NumberRange | None = None  # of a number
    most: int | None = None  # entries of a list; neither: true or false
    entries: str = ""  # what the entries of a list are
    history: bool = False  # whether the tokens before matter
    beside_beams: bool = True  # whether a beam search may have another value than the default
    http: str | None = (
        None  # the field in both endpoints of OpenAI's API; None: it has none, or it differs (docs/http.md)
    )
    vllm: str | None = None  # the name in gpu_worker.LLM, where vLLM has another
    transformers: str | None = None  # the name in generation_config.json; None: no model recommends it
    flag: str | None = None  # how the command line shows the value; empty for a flag without one; None: no flag
    is_filter: bool = False  # whether it is of a further filter, and so a column of csrc/include/octavo/filters.h
    left_out: str = ""  # what a request gets that leaves it out, if the default does not say it
    since: int = 4  # the revision of octavo.v1 in which it came, at the latest

    @property
    def is_late(self) -> bool:
        """Whether it came after the first records were written: at its default it is in none."""
        return self.since > 4

    @property
    def is_flag(self) -> bool:
        return self.allowed is None and self.most is None and not self.is_constraint

    @property
    def is_constraint(self) -> bool:
        return self.name == "constraint"

    def check_count(self, values: Collection[object]) -> None:
        """Refuses a list that is longer than its limit. It is cheap, and so can run before the list is copied."""
        if self.most is not None and not len(values) <= self.most:
            raise InvalidArgument(self.name, f"{len(values)} entries are too many; at most {self.most}")

    @property
    def is_ids(self) -> bool:
        """Whether it is a list of token ids."""
        return self.entries == "token ids"


def _row(default: Any, kind: ParameterKind, what: str, allowed: NumberRange | None = None, **more: Any) -> Any:
    """The field of a parameter. `more` are further fields of its row, with SAME for the parameter's own name."""
    row = Parameter(kind=kind, what=what, allowed=allowed, **more)
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata={"row": row})
    return field(default=default, metadata={"row": row})


_EMPTY: Mapping[int, float] = MappingProxyType({})
_DRAWS, _ADJUSTS, _BRANCHES, _ENDS, _REPORTS = ParameterKind
_DRAWN: dict[str, Any] = {"http": SAME, "transformers": SAME, "beside_beams": False}
_FILTER: dict[str, Any] = {"http": SAME, "beside_beams": False, "is_filter": True}
_PENALTY: dict[str, Any] = {"http": SAME, "history": True, "beside_beams": False}
_IDS: dict[str, Any] = {"entries": "token ids", "http": SAME}
_BIASES = f"values {-limits.MAX_LOGIT_BIAS_VALUE:g} to {limits.MAX_LOGIT_BIAS_VALUE:g}"
_SCORES = integers(0, limits.MAX_LOGPROBS, optional=True)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends."""

    # fmt: off
    temperature: float = _row(1.0, _DRAWS, "how evenly tokens are drawn; 0: always the likeliest token",
        NumberRange(0, 10), **_DRAWN, flag="T")
    top_p: float = _row(1.0, _DRAWS, "draws from the likeliest tokens that make up this probability",
        NumberRange(0, 1, above=True), **_DRAWN, flag="P")
    top_k: int = _row(0, _DRAWS, "draws from this many likeliest tokens; 0: from all",
        integers(0, U32_MAX), **_DRAWN, flag="N")
    min_p: float = _row(0.0, _DRAWS, "never draws a token less likely than this times the likeliest",
        NumberRange(0, 1), **_DRAWN, flag="P")
    n: int = _row(1, _BRANCHES, "outputs that are returned", integers(1, limits.MAX_N), http=SAME)
    best_of: int = _row(0, _BRANCHES, "outputs that are generated, of which the best are returned",
        integers(0, limits.MAX_N), left_out="n")
    max_tokens: int | None = _row(None, _ENDS, "output at most", integers(1, U32_MAX, optional=True),
        transformers="max_new_tokens", flag="TOKENS", left_out=f"{limits.DEFAULT_MAX_TOKENS}, or what fits the context")
    min_tokens: int = _row(0, _ENDS, "no end before this many tokens", integers(0, U32_MAX), history=True, http=SAME)
    stop: tuple[str, ...] = _row((), _ENDS, "a text that ends the answer where it comes; there may be several",
        most=limits.MAX_STOP, entries=f"1 to {limits.MAX_STOP_BYTES} bytes", http=SAME, flag="TEXT")
    stop_token_ids: tuple[int, ...] = _row((), _ENDS, "end the answer, as the model's end tokens do",
        most=limits.MAX_STOP_TOKEN_IDS, **_IDS)
    include_stop: bool = _row(False, _REPORTS, "shows the text that ended the answer",
        http="include_stop_str_in_output", vllm="include_stop_str_in_output")
    ignore_eos: bool = _row(False, _ENDS, "goes on after the model's end token", http=SAME, flag="")
    repetition_penalty: float = _row(1.0, _ADJUSTS, "above 1: avoids tokens that were there",
        NumberRange(0, 10, above=True), **_PENALTY, transformers=SAME, flag="X")
    presence_penalty: float = _row(0.0, _ADJUSTS, "above 0: avoids tokens of the output",
        NumberRange(-2, 2), **_PENALTY)
    frequency_penalty: float = _row(0.0, _ADJUSTS, "above 0: avoids tokens of the output, the more the more there are",
        NumberRange(-2, 2), **_PENALTY)
    logit_bias: Mapping[int, float] = _row(_EMPTY, _ADJUSTS, "is added to the logits of these tokens",
        most=limits.MAX_LOGIT_BIAS, entries=_BIASES, http=SAME)
    allowed_token_ids: tuple[int, ...] = _row((), _ADJUSTS, "the only tokens that may come",
        most=limits.MAX_LISTED_TOKEN_IDS, **_IDS)
    banned_token_ids: tuple[int, ...] = _row((), _ADJUSTS, "tokens that never come",
        most=limits.MAX_LISTED_TOKEN_IDS, **_IDS)
    banned_sequences: tuple[tuple[int, ...], ...] = _row((), _ADJUSTS, "runs of tokens that no output contains",
        most=limits.MAX_BANNED_SEQUENCES, entries=f"1 to {limits.MAX_BANNED_SEQUENCE_TOKENS} token ids", history=True)
    seed: int | None = _row(None, _DRAWS, "makes the answer repeatable", integers(0, U64_MAX, optional=True),
        http=SAME, flag="N", left_out="the router draws one")
    logprobs: int | None = _row(None, _REPORTS, "likeliest tokens told beside each token, with log probabilities",
        _SCORES, left_out="none")
    prompt_logprobs: int | None = _row(None, _REPORTS, "the same beside each token of the prompt",
        _SCORES, left_out="none")
    beam_width: int = _row(0, _BRANCHES, "outputs that a beam search keeps at once", integers(0, limits.MAX_BEAM_WIDTH),
        http=SAME, left_out="0, no beam search")
    length_penalty: float = _row(1.0, _BRANCHES, "the score of a beam is divided by its length to this power",
        NumberRange(0, 4), http=SAME)
    skip_special_tokens: bool = _row(True, _REPORTS, "leaves special tokens out of the text", http=SAME)
    typical_p: float = _row(1.0, _DRAWS, "draws from the tokens, neither too likely nor too surprising, that make"
        " up this probability", NumberRange(0, 1, above=True), **_FILTER, transformers=SAME, flag="P", since=5)
    xtc_threshold: float = _row(0.1, _DRAWS, "tokens of at least this probability are top choices",
        NumberRange(0, 1), **_FILTER, flag="P", since=6)
    xtc_probability: float = _row(0.0, _DRAWS, "how often all top choices but the least likely are left out; 0: never",
        NumberRange(0, 1), **_FILTER, flag="P", since=6)
    constraint: Constraint | None = _row(None, _ADJUSTS,  # noqa: RUF009
        "the output has this form: a JSON schema, any JSON object, a"
        " regular expression, a Lark grammar, one of some texts, or text with tagged parts (docs/constraints.md)",
        beside_beams=False, history=True, vllm="structured_outputs", left_out="none", since=7)
    thinking_budget: int | None = _row(None, _ADJUSTS, "tokens that a model may think before it is made to end that",
        integers(0, U32_MAX, optional=True), http=SAME, history=True, beside_beams=False,
        vllm="thinking_token_budget", left_out="any number", since=8)
    thinking_start_ids: tuple[int, ...] = _row((), _ADJUSTS, "the mark with which thinking begins",
        most=limits.MAX_MARK_TOKENS, left_out="the model's", since=8, **_IDS)
    thinking_end_ids: tuple[int, ...] = _row((), _ADJUSTS, "the mark with which thinking ends",
        most=limits.MAX_MARK_TOKENS, left_out="the model's", since=8, **_IDS)
    # fmt: on

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

    @property
    def summed(self) -> bool:
        """Whether the record keeps the sum of the log probabilities of each branch that has ended.

        Where a router's stop string may end it, nobody knows the sum at that token unless branches are ranked.
        """
        return self.ranked or (self.logprobs is not None and not self.stop)


class SamplingArguments(TypedDict, total=False):
    """The fields of SamplingParams, as a caller may write them. None means the default."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    n: int | None
    best_of: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop: bool | None
    ignore_eos: bool | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    banned_token_ids: Sequence[int] | None
    banned_sequences: Sequence[Sequence[int]] | None
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    beam_width: int | None
    length_penalty: float | None
    skip_special_tokens: bool | None
    typical_p: float | None
    xtc_threshold: float | None
    xtc_probability: float | None
    constraint: Constraint | None
    thinking_budget: int | None
    thinking_start_ids: Sequence[int] | None
    thinking_end_ids: Sequence[int] | None


def _parameters() -> dict[str, Parameter]:
    made, defaults = {}, SamplingParams()
    for each in fields(SamplingParams):
        row: Parameter = each.metadata["row"]
        same: dict[str, Any] = {name: each.name for name in ("http", "transformers") if getattr(row, name) == SAME}
        made[each.name] = replace(row, name=each.name, default=getattr(defaults, each.name), **same)
    return made


PARAMETERS: Mapping[str, Parameter] = MappingProxyType(_parameters())


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


def rank(scores: Sequence[float | None], n: int) -> list[int]:
    """The n best branches, best first. Equal scores keep their order; branches without a score come last."""
    worst = float("-inf")
    order = sorted(range(len(scores)), key=lambda b: (-(worst if (score := scores[b]) is None else score), b))
    return order[:n]
