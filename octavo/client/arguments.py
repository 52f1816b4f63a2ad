"""The keyword arguments of the SDK's methods, with their types, so that a type checker refuses a misspelt one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypedDict

from octavo.request import errors
from octavo.request.sampling import PARAMETERS, SamplingArguments, SamplingParams
from octavo.settings.options import closest

PriorityName: TypeAlias = Literal["", "system", "interactive", "default", "bulk"]


class RequestArguments(SamplingArguments, total=False):
    """The keyword arguments of `generate` and `complete`: those of the request, and those of its sampling."""

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
        if name not in PARAMETERS:
            hint = closest(name, RequestArguments.__annotations__)
            raise errors.InvalidArgument(name, f"there is no such argument{hint}")
    base = sampling or SamplingParams()
    values = {**{name: getattr(base, name) for name in _LISTS}, **arguments}
    return replace(base, **{name: _plain(name, value) for name, value in values.items()})


def _plain(name: str, value: Any) -> Any:
    if value is None:
        return PARAMETERS[name].default
    return (value,) if name == "stop" and isinstance(value, str) else value


_LISTS = tuple(name for name, row in PARAMETERS.items() if row.most is not None)
