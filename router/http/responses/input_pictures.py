"""The pictures of a conversation: as parts of its items, and what a record keeps of them.

A record keeps the files that were fetched, so a response that follows shows the same pictures. Where that is too much,
none is kept, and a response that follows is refused.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.pictures.parts import PicturePart, is_data_url
from octavo.request.errors import InvalidArgument
from router.http.bodies.field_reader import FieldReader

PICTURE = "input_image"  # the type of a part
DETAILS = ("low", "high", "auto", "original")  # as OpenAI has them; all change nothing
FETCHED, LEFT_OUT = "fetched", "left_out"  # fields of kept parts that nobody is shown: bytes; that they are not here


def read_picture(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A part as the client has sent it. Raises InvalidArgument."""
    fields = FieldReader(part, path=f"{path}.")
    fields.take_ignored(["type", "prompt_cache_breakpoint"])
    fields.take_harmless("file_id", [], "is not supported: no files are kept here; send image_url")
    detail, url = fields.take_text("detail") or DETAILS[2], fields.take_text("image_url")
    if detail not in DETAILS:
        fields.refuse("detail", f"must be one of {', '.join(DETAILS)}")
    if not url and not fields.checks.found:
        fields.refuse("image_url", "is missing; send data:image/png;base64,… or a URL of https")
    fields.refuse_rest()
    fields.checks.raise_found()
    return {"type": PICTURE, "image_url": url, "detail": detail}


def picture_of(part: Mapping[str, Any], field: str) -> PicturePart:
    """What a chat shows. Raises InvalidArgument if its bytes were not kept."""
    if part.get(LEFT_OUT):
        what = "pictures of that conversation were too large to be kept"
        raise InvalidArgument(field, f"{what}: send all of it as input, or smaller pictures from the start")
    if FETCHED in part:
        return PicturePart(field, data=base64.b64decode(part[FETCHED]))
    return PicturePart(field, url=part["image_url"])


def note_fetched(items: Sequence[dict[str, Any]], fetched: Sequence[bytes]) -> None:
    """Keeps with each picture of the items what was fetched for it; empty: nothing was."""
    for part, data in zip(_pictures_in(items), fetched, strict=True):
        if data:
            part[FETCHED] = base64.b64encode(data).decode()


def leave_out_pictures(items: Sequence[dict[str, Any]]) -> bool:
    """Takes the bytes of pictures out of items. Returns whether there were any."""
    found = list(_pictures_in(items))
    for part in found:
        part.pop(FETCHED, None)
        part[LEFT_OUT] = True
        if is_data_url(part["image_url"] or ""):
            part["image_url"] = None
    return bool(found)


def shown(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as their client may see them again."""
    return [{name: _shown_parts(value) for name, value in item.items()} for item in items]


def _shown_parts(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [{name: each for name, each in part.items() if name not in (FETCHED, LEFT_OUT)} for part in value]


def _pictures_in(items: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for item in items:
        for parts in (item.get("content"), item.get("output")):
            if isinstance(parts, list):
                yield from (part for part in parts if part["type"] == PICTURE)
