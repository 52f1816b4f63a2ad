"""The keyword arguments of the SDK's methods, with their types, so that a type checker refuses a misspelt one."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, Literal, TypeAlias, TypedDict

from octavo.request import errors
from octavo.request.sampling import SamplingParams
from octavo.settings.options import closest

PriorityName: TypeAlias = Literal["", "system", "interactive", "default", "bulk"]


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


class RequestArguments(SamplingArguments, total=False):
    """The keyword arguments of `generate` and `complete`: fields of the request, and its sampling parameters."""

    model: str | None
    request_id: str | None
    deadline_s: float | None
    priority: PriorityName
    keep_on_disconnect: bool


class AttachArguments(TypedDict, total=False):
    """The keyword arguments of `attach`."""

    next_indexes: Sequence[int]
    resume_token: bytes
    deadline_s: float | None


class DetokenizeArguments(TypedDict, total=False):
    """The keyword arguments of `detokenize`."""

    model: str | None
    skip_special_tokens: bool


def make_sampling(sampling: SamplingParams | None, arguments: Mapping[str, Any]) -> SamplingParams:
    """`sampling` with some fields replaced. One string as `stop` is a list of one; None is the default of a field.

    Raises InvalidArgument, with the closest name, for an argument that does not exist.
    """
    for name in arguments:
        if name not in _DEFAULTS:
            hint = closest(name, RequestArguments.__annotations__)
            raise errors.InvalidArgument(name, f"there is no such argument{hint}")
    base = sampling or SamplingParams()
    values = {**{name: getattr(base, name) for name in _LISTS}, **arguments}
    return replace(base, **{name: _plain(name, value) for name, value in values.items()})


def _plain(name: str, value: Any) -> Any:
    if value is None:
        return _DEFAULTS[name]
    return (value,) if name == "stop" and isinstance(value, str) else value


_DEFAULTS: dict[str, Any] = {
    field.name: field.default if field.default_factory is MISSING else field.default_factory()
    for field in fields(SamplingParams)
}
_LISTS = tuple(name for name, default in _DEFAULTS.items() if isinstance(default, (tuple, Mapping)))
