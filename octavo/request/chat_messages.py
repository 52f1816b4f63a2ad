"""Chat messages as callers write them: (role, content) pairs, or dictionaries as OpenAI's API has them."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from octavo.request.errors import InvalidArgument

# One message: ("user", "Hi"), {"role": "user", "content": "Hi"}, or with a list of text parts as its content:
# {"role": "user", "content": [{"type": "text", "text": "Hi"}]}.
ChatTurn: TypeAlias = tuple[str, str] | Mapping[str, object]


def is_conversation(value: object) -> bool:
    """Whether a value is a list of messages, rather than a text, token ids, or a list of conversations."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        return False
    first = value[0]
    return isinstance(first, Mapping) or (isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], str))


PICTURE = "image_url"  # the type of a part that shows one, and the name of its field


def shows_pictures(content: object) -> bool:
    """Whether a picture is among the parts of a content."""
    if not isinstance(content, Sequence) or isinstance(content, (str, bytes, bytearray)):
        return False
    return any(isinstance(part, Mapping) and part.get("type") == PICTURE for part in content)


def url_of_picture(part: object, where: str) -> str | None:
    """Where the picture of a part is, {"type": "image_url", "image_url": {"url": …}}; None for another part.

    Raises InvalidArgument if it has no URL.
    """
    if not isinstance(part, Mapping) or part.get("type") != PICTURE:
        return None
    link = part.get(PICTURE)
    url = link.get("url") if isinstance(link, Mapping) else link
    if not isinstance(url, str) or not url:
        raise InvalidArgument(f"{where}.{PICTURE}", 'must be {"url": "data:image/png;base64,…"}, or a URL of https')
    return url


def text_of_part(part: object, where: str) -> str:
    """The text of a part. Raises InvalidArgument for another one."""
    return _part(part, where)


def message_pairs(turns: Sequence[ChatTurn], field: str, first: int = 0) -> list[tuple[str, str]]:
    """The messages as pairs of role and content. The texts of a content that has parts are joined by newlines.

    `first`: the place of the first one among the messages that the caller has given.

    Raises InvalidArgument, which names the place below `field`, for anything that is no message, and for a part that is
    no text.
    """
    listed: object = turns
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes)):
        raise InvalidArgument(field, 'must be a list of {"role": …, "content": …}')
    return [_pair(turn, f"{field}[{i}]") for i, turn in enumerate(turns, first)]


def _pair(turn: object, where: str) -> tuple[str, str]:
    if isinstance(turn, Mapping):
        role, content = _of_mapping(turn, where)
    elif isinstance(turn, tuple) and len(turn) == 2:
        role, content = turn
    else:
        raise InvalidArgument(where, 'must be {"role": …, "content": …}, or a pair of role and content')
    if not isinstance(role, str):
        raise InvalidArgument(f"{where}.role", f"a {type(role).__name__} is no text")
    return role, _text(content, f"{where}.content")


def _of_mapping(turn: Mapping[object, object], where: str) -> tuple[object, object]:
    for name, value in turn.items():
        if name not in ("role", "content") and value is not None:
            raise InvalidArgument(f"{where}.{name}", "is not supported; a message has a role and a content")
    for name in ("role", "content"):
        if name not in turn:
            raise InvalidArgument(where, f"has no {name}")
    return turn["role"], turn["content"]


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    raise InvalidArgument(where, f"a {type(content).__name__} is neither text nor a list of parts")


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidArgument(
        where, f'a part of type {str(kind)[:40]!r} is not supported; give {{"type": "text", "text": …}}'
    )
