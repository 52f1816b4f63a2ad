"""Reads generation_config.json: the end tokens of a model, and the sampling parameters that its authors recommend."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from octavo.model_files.json_file import read_json
from octavo.request.errors import BadModel, InvalidArgument
from octavo.request.sampling import PARAMETERS, ParameterKind
from octavo.request.sampling_validation import check_number

FILE = "generation_config.json"
NONE: Mapping[str, float] = MappingProxyType({})


def read_object(path: Path) -> Mapping[str, Any]:
    """The content of a file of JSON. BadModel if it cannot be read, or is no object."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise BadModel(f"{path.name}: {error}") from error
    if not isinstance(content, dict):
        raise BadModel(f"{path.name}: not an object")
    return content


def read_generation_config(directory: Path) -> Mapping[str, Any]:
    """The content of the file; empty if there is none. BadModel if it cannot be read."""
    return read_object(directory / FILE) if (directory / FILE).exists() else NONE


def sampling_defaults(content: Mapping[str, Any]) -> Mapping[str, float]:
    """The recommended values, by the names of SamplingParams; only those that the file gives.

    With `do_sample` false, what says how tokens are drawn is left out, as Transformers leaves it out. BadModel for a
    value that no request may have.
    """
    greedy, given = content.get("do_sample") is False, {}
    for row in PARAMETERS.values():
        value = content.get(row.transformers) if row.transformers else None
        if value is None or row.allowed is None or (greedy and row.kind is ParameterKind.DRAWS):
            continue
        given[row.name] = 0 if row.name == "top_k" and value == -1 else value
        try:
            check_number(row.name, given[row.name], row.allowed)
        except InvalidArgument:
            off = "correct it, or start the worker with --generation-config off"
            raise BadModel(f"{FILE}: {row.name} {value!r} is not {row.allowed}: {off}") from None
    return MappingProxyType(given)
