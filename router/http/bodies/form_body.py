"""Reads a body of multipart/form-data, as a browser sends a form: texts by name, and the bytes of files."""

import json
import re
from contextlib import suppress
from typing import Any

from octavo.request.errors import InvalidArgument
from router.http.bodies.json_body import refuse_constant
from router.http.bodies.unknown_fields import REFUSE, ClientBody, shown_name

MAX_PARTS = 64
MAX_HEADER_BYTES = 4096  # of a part
BOUNDARY = re.compile(r'multipart/form-data\s*;.*?\bboundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
NAME = re.compile(r'content-disposition:\s*form-data\s*;(?:.*;)?\s*name="([^"\r\n]*)"', re.IGNORECASE)
TEXTS = ("language", "model", "prompt", "request_id", "response_format", "task")  # whatever they look like


def parse_form(data: bytes, content_type: str, files: tuple[str, ...], unknown_fields: str = REFUSE) -> ClientBody:
    """The fields of a form. Those named in `files` are bytes; others are what their text is as JSON, or the text.

    Raises InvalidArgument.
    """
    found = BOUNDARY.match(content_type)
    if found is None:
        raise InvalidArgument("body", "must be multipart/form-data with a boundary, as curl -F sends it")
    mark = b"\r\n--" + (found[1] or found[2]).encode("latin-1")
    parts = (b"\r\n" + data).split(mark, MAX_PARTS + 1)
    if len(parts) > MAX_PARTS + 1:
        raise InvalidArgument("body", f"has more than {MAX_PARTS} fields; leave some out")
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise InvalidArgument("body", "is no form, or is cut: send all of it, with its last boundary")
    fields: dict[str, Any] = {}
    for part in parts[1:-1]:
        name, content = _field_of(part)
        if name in fields:
            raise InvalidArgument(shown_name(name), "is there twice; send it once")
        fields[name] = content if name in files else _value_of(name, content)
    return ClientBody(fields, unknown_fields)


def _field_of(part: bytes) -> tuple[str, bytes]:
    head, separator, content = part.partition(b"\r\n\r\n")
    if not separator or len(head) > MAX_HEADER_BYTES:
        raise InvalidArgument("body", "has a field without a head, or with one that is too long")
    for line in head.decode("utf-8", "replace").split("\r\n"):
        if named := NAME.match(line):
            return named[1], content
    raise InvalidArgument("body", "has a field without a name")


def _value_of(name: str, content: bytes) -> Any:
    """A number, true or false, or a text: forms have texts alone."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(shown_name(name), "is no text in UTF-8") from None
    if name not in TEXTS:
        with suppress(ValueError, RecursionError):
            return json.loads(text, parse_constant=refuse_constant)
    return text
