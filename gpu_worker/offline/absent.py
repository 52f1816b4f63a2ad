"""What vLLM's LLM, SamplingParams and generate take and octavo does not have: each name, and what to do instead.

The table is absent.txt. A value that asks for nothing octavo lacks (`data_parallel_size=1`) is accepted. Any other
value is refused by its name: no argument is silently ignored.
"""

import ast
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import wraps
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

from octavo.request.errors import Unimplemented, closest


class AbsentArgument(NamedTuple):
    """An argument that octavo does not have: the values that ask for nothing, and what to do instead of the others."""

    remedy: str
    harmless: tuple[object, ...]


def _read_table(text: str) -> dict[str, dict[str, AbsentArgument]]:
    """The arguments of each section, by their names or, after a star, by a word of their names."""
    tables: dict[str, dict[str, AbsentArgument]] = {}
    remedies: dict[str, str] = {}
    for line in text.splitlines():
        names, *cells = map(str.strip, line.split("|"))
        if line.startswith("["):
            found = tables[line.strip("[]")] = {}
        elif line.startswith("$"):
            remedies[names] = cells[0]
        elif cells and not line.startswith("#"):
            values = ast.literal_eval(f"({cells[0]},)") if cells[0] else ()
            harmless = values if values[:1] == (None,) else (None, False, *values)
            found.update(dict.fromkeys(names.split(), AbsentArgument(remedies.get(cells[1], cells[1]), harmless)))
    return tables


_TABLES = _read_table((files(__package__) / "absent.txt").read_text())
LLM_ARGUMENTS = _TABLES["LLM"]
PARAMS_ARGUMENTS = _TABLES["SamplingParams"]
BEAM_ARGUMENTS = _TABLES["BeamSearchParams"]
CALL_ARGUMENTS = _TABLES["call"]
POOLING_ARGUMENTS = CALL_ARGUMENTS | _TABLES["pooling"]
CHAT_ARGUMENTS = CALL_ARGUMENTS | _TABLES["chat"]
LORA_ARGUMENTS = _TABLES["LoRARequest"]
PROMPT_KEYS = _TABLES["prompt"]
METHODS = {name: method.remedy for name, method in _TABLES["methods"].items()}

Params = TypeVar("Params", bound=type[Any])


def is_generating(runner: object) -> bool:
    """Whether `runner` is None or vLLM's name of a model that generates text; not if it is a runner that exists.

    Raises Unimplemented for another name, and TypeError for what is neither.
    """
    if runner is None or isinstance(runner, str):
        refuse_absent("LLM", {"runner": runner}, (), _TABLES["runner"])
        return True
    if not hasattr(runner, "info"):
        raise TypeError(f"runner={_shown(runner)}: is neither a name nor a runner; leave it out")
    return False


def refusing(owner: str, absent: Mapping[str, AbsentArgument]) -> Callable[[Params], Params]:
    """Decorates a dataclass: its constructor refuses absent arguments, and passes over harmless ones."""

    def decorate(cls: Params) -> Params:
        known, construct = {field.name for field in fields(cls)}, cls.__init__

        @wraps(construct)
        def checked(self: object, *values: object, **given: object) -> None:
            refuse_absent(owner, given, known, absent)
            construct(self, *values, **{name: value for name, value in given.items() if name in known})

        cls.__init__ = checked
        return cls

    return decorate


def refuse_absent(
    owner: str, given: Mapping[str, object], known: Collection[str], absent: Mapping[str, AbsentArgument]
) -> None:
    """Raises TypeError for a name that is neither known nor absent, and Unimplemented for an absent one.

    An absent argument with a harmless value passes.
    """
    for name, value in given.items():
        if name in known:
            continue
        stands_for = (absent[word] for part in name.split("_") if (word := f"*{part}") in absent)
        argument = absent.get(name) or next(stands_for, None)
        if argument is None:
            raise TypeError(f"{owner} has no option {name!r}{closest(name, known)}")
        if not any(type(value) is type(harmless) and value == harmless for harmless in argument.harmless):
            raise Unimplemented(f"{name}={_shown(value)}: {argument.remedy}")


def _shown(value: object) -> str:
    """A value as it may stand in a message: short, and never an object's own text."""
    if isinstance(value, str):
        return repr(value[:40])
    return repr(value) if isinstance(value, (bool, int, float)) else f"<{type(value).__name__}>"
