"""Takes the fields of a JSON object one by one, checks their types, and refuses by name what nobody has taken."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from octavo.request import limits
from octavo.request.errors import FieldViolation, InvalidArgument, ViolationCollector
from octavo.request.limits import NumberRange
from octavo.request.sampling_validation import check_number
from router.http.bodies.unknown_fields import MAX_NAMED, NOT_SUPPORTED, ClientBody, shown_name

T = TypeVar("T")


class FieldReader:
    """The fields of an object that are not taken yet. A field that is null counts as left out, as OpenAI has it."""

    def __init__(self, fields: Mapping[str, Any], checks: ViolationCollector | None = None, path: str = "") -> None:
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._body = fields if isinstance(fields, ClientBody) else ClientBody({})
        self._is_top = not path
        self.checks = ViolationCollector() if checks is None else checks
        self._path = path

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def get(self, name: str) -> Any:
        """The value of a field, which stays there; None if it is left out."""
        return self._fields.get(name)

    def take_any(self, name: str) -> Any:
        """The value of a field, whatever it is; None if it is left out."""
        return self._fields.pop(name, None)

    def take_text(self, name: str, default: str = "") -> str:
        value = self._fields.pop(name, None)
        return default if value is None else self._run(checked_text, name, value) or default

    def take_flag(self, name: str, default: bool = False) -> bool:
        value = self._fields.pop(name, None)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.refuse(name, "must be true or false")
        return default

    def take_number(self, name: str, allowed: NumberRange) -> Any:
        """A number in the range, whole if the range is of whole numbers; None if it is left out or refused."""
        value = self._fields.pop(name, None)
        if value is None:
            return None
        if allowed.integer and isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)  # languages whose numbers are all floats write 16.0
        return value if self._passes(check_number, name, value, allowed) else None

    def take_object(self, name: str) -> "FieldReader | None":
        """The fields of an object inside this one; None if it is left out or refused."""
        value = self._fields.pop(name, None)
        if value is None:
            return None
        if isinstance(value, dict):
            return FieldReader(value, self.checks, f"{self._path}{name}.")
        self.refuse(name, "must be an object")
        return None

    def take_ignored(self, names: Sequence[str]) -> None:
        """Leaves out fields that clients send and that change no answer."""
        for name in names:
            self._fields.pop(name, None)

    def take_harmless(self, name: str, harmless: Sequence[object], what: str) -> None:
        """Takes a field whose other values would change the answer in a way that is not supported."""
        value = self._fields.pop(name, None)
        if value is not None and not any(value == each and type(value) is type(each) for each in harmless):
            self.refuse(name, what)

    def refuse(self, name: str, what: str) -> None:
        self.checks.found.append(FieldViolation(f"{self._path}{name}", what))

    def take_rest(self) -> dict[str, Any]:
        """All that has not been taken."""
        rest, self._fields = self._fields, {}
        return rest

    def refuse_rest(self, refusal_of: Callable[[str], str] = lambda _: NOT_SUPPORTED) -> None:
        """Refuses what has not been taken: a field that changes the answer must not be dropped in silence."""
        rest = [name for name, value in self._fields.items() if not (self._is_top and self._body.ignores(name, value))]
        for name in rest[:MAX_NAMED]:
            self.refuse(shown_name(name), refusal_of(name) if self._is_top else NOT_SUPPORTED)
        self._fields.clear()

    def _run(self, check: Callable[..., T], name: str, *arguments: Any) -> T | None:
        return self.checks.run(check, f"{self._path}{name}", *arguments)

    def _passes(self, check: Callable[..., None], name: str, *arguments: Any) -> bool:
        before = len(self.checks.found)
        self._run(check, name, *arguments)
        return len(self.checks.found) == before


def checked_text(field: str, value: object) -> str:
    """A text that has a UTF-8 form. Raises InvalidArgument."""
    if not isinstance(value, str):
        raise InvalidArgument(field, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can spell
        raise InvalidArgument(field, f"has no UTF-8 form at character {error.start}") from None
    return value


def json_text(value: Any, path: str) -> str:
    """A value as JSON. Raises InvalidArgument for one that has no such form, or that no parser would read again."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell
        raise InvalidArgument(path, "has a text without a UTF-8 form") from None
    except (RecursionError, ValueError):
        raise InvalidArgument(path, "is nested too deep") from None
    return text


def checked_ids(field: str, value: object, most: int) -> list[int]:
    """A list of numbers that may be token ids. Raises InvalidArgument."""
    if not isinstance(value, list) or len(value) > most:
        raise InvalidArgument(field, f"must be a list of at most {most} token ids")
    for place, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id <= limits.U32_MAX:
            raise InvalidArgument(field, f"there is no token id at position {place}")
    return value
