"""Reads a body of multipart/form-data, as a browser sends a form: texts by name, and the bytes of files."""

import json
import re
from typing import Any

from octavo.request.errors import InvalidArgument
from router.http.bodies.json_body import refuse_constant
from router.http.bodies.unknown_fields import REFUSE, ClientBody, shown_name

MAX_PARTS = 64
MAX_HEADER_BYTES = 4096  # of a part
MAX_JSON_BYTES = 64 * 1024  # of a list or an object
MAX_BOUNDARY = 70
PARAMETER = re.compile(r'(?:\s*;)+\s*([^\s=;"]+)=(?:"((?:[^"\\\r\n]|\\.)*)"|([^\s;"]*))')
HEADER, BLANK = b"content-disposition", b"\r\n\r\n"
CUT = "is no form, or is cut: send all of it, with its last boundary"
# Texts, whatever they look like. Others are numbers, lists or objects, if they are JSON of such.
TEXTS = {"bad_words", "language", "model", "on_disconnect", "prefix", "prompt", "request_id", "response_format", "stop"}
TEXTS |= {"task", "truncation_side"}


def parse_form(data: bytes, content_type: str, files: tuple[str, ...], unknown_fields: str = REFUSE) -> ClientBody:
    """The fields of a form. Those named in `files` are views of `data`, and what else is no text is bytes. Others are
    texts; but numbers, true and false, lists and objects, where no text is meant. What has a name that ends in [] may
    come several times.

    Raises InvalidArgument.
    """
    boundary = _parameters(content_type, "multipart/form-data").get("boundary", "")
    if not 0 < len(boundary) <= MAX_BOUNDARY:
        raise InvalidArgument("body", "must be multipart/form-data with a boundary, as curl -F sends it")
    parts = _divided(memoryview(data), data, b"\r\n--" + boundary.encode("latin-1"))
    fields: dict[str, Any] = {}
    several: dict[str, list[Any]] = {}  # of lists, as forms have them
    for part in parts:
        name, content = _field_of(part)
        value = content if name in files else _value_of(name, bytes(content))
        if name not in fields:
            fields[name] = value
        elif name.endswith("[]"):
            several.setdefault(name, [fields[name]]).append(value)
        else:
            raise InvalidArgument(shown_name(name), "is there twice; send it once")
    return ClientBody(fields | several, unknown_fields)


def _divided(view: memoryview, data: bytes, mark: bytes) -> list[memoryview]:
    """What stands between marks. A file may be large: nothing of it is copied."""
    parts: list[memoryview] = []
    first = -2 if data.startswith(mark[2:]) else data.find(mark)
    if first == -1:
        raise InvalidArgument("body", CUT)
    place = first + len(mark)
    while (end := data.find(mark, place)) >= 0:
        parts.append(view[place:end])
        place = end + len(mark)
        if len(parts) > MAX_PARTS:
            raise InvalidArgument("body", f"has more than {MAX_PARTS} fields; leave some out")
    if not data.startswith(b"--", place):
        raise InvalidArgument("body", CUT)
    return parts


def _field_of(part: memoryview) -> tuple[str, memoryview]:
    head, separator, _ = bytes(part[: MAX_HEADER_BYTES + len(BLANK)]).partition(BLANK)
    if not separator:
        raise InvalidArgument("body", "has a field without a head, or with one that is too long")
    content = part[len(head) + len(BLANK) :]
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == HEADER:
            name = _parameters(value.decode("utf-8", "replace"), "form-data").get("name")
            if name is not None:
                return name, content
    raise InvalidArgument("body", "has a field without a name")


def _parameters(text: str, kind: str) -> dict[str, str]:
    """The parameters of a header of this kind. Where a name comes twice, the first one counts."""
    said, _, _ = text.partition(";")
    found: dict[str, str] = {}
    if said.strip().lower() != kind:
        return found
    place = len(said)
    while each := PARAMETER.match(text, place):
        found.setdefault(each[1].lower(), each[3] if each[2] is None else each[2])
        place = each.end()
    return found


def _value_of(name: str, content: bytes) -> Any:
    """What a field is: forms have texts alone."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        if name in TEXTS:
            raise InvalidArgument(shown_name(name), "is no text in UTF-8") from None
        return content
    if name in TEXTS or len(content) > MAX_JSON_BYTES:
        return text
    try:
        found = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return text
    return text if found is None or isinstance(found, str) else found
