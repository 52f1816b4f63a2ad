"""Reads generation_config.json: the end tokens of a model, and the sampling parameters that its authors recommend."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from octavo.model_files.json_file import read_json
from octavo.request import limits
from octavo.request.errors import BadModel

FILE = "generation_config.json"
NONE: Mapping[str, float] = MappingProxyType({})
# Names of Transformers, and ours. Transformers uses the first group only where it samples.
DRAWING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
ALWAYS = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}


def read_generation_config(directory: Path) -> Mapping[str, Any]:
    """The content of the file; empty if there is none. BadModel if it cannot be read."""
    try:
        content = read_json(directory / FILE)
    except FileNotFoundError:
        return NONE
    except (OSError, ValueError) as error:
        raise BadModel(f"{FILE}: {error}") from error
    if not isinstance(content, dict):
        raise BadModel(f"{FILE}: not an object")
    return content


def sampling_defaults(content: Mapping[str, Any]) -> Mapping[str, float]:
    """The recommended values, by the names of SamplingParams; only those that the file gives.

    With `do_sample` false, what says how tokens are drawn is left out, as Transformers leaves it out. BadModel for a
    value that no request may have.
    """
    names = ALWAYS if content.get("do_sample") is False else DRAWING | ALWAYS
    given = {ours: content[theirs] for theirs, ours in names.items() if content.get(theirs) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    for ours, value in given.items():
        allowed = limits.NUMBERS[ours]
        number = type(value) is int or (type(value) is float and not allowed.integer)
        if not (number and value in allowed):
            off = "correct it, or start the worker with --generation-config off"
            raise BadModel(f"{FILE}: {ours} {value!r} is not {allowed}: {off}")
    return MappingProxyType(given)
