"""The items of a conversation: checked, in the form in which they are shown again, and as turns of a chat."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from octavo.pictures.parts import Part
from octavo.request import limits
from octavo.request.errors import InvalidArgument
from router.http.bodies.field_reader import FieldReader, checked_text
from router.http.chats.chat_writer import ChatWriter
from router.http.responses.input_pictures import PICTURE, picture_of, read_picture

Item = dict[str, Any]

ROLES = {"developer": "system"}  # OpenAI's newer name of the role; templates know the older one
MESSAGE_ROLES = ("user", "assistant", "system", "developer")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # where a part has its text
IDS = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
IGNORED = ("id", "status", "phase")
MAX_LISTED = limits.MAX_CHAT_MESSAGES


def read_items(value: Any, response_id: str) -> list[Item]:
    """The items of `input`, which is a text or a list. Ids are those of the client, or a function of their place."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value or len(value) > MAX_LISTED:
        raise InvalidArgument("input", f"must be a text, or a list of 1 to {MAX_LISTED} items")
    return [_read_item(item, f"input[{i}]", f"{response_id}/in/{i}") for i, item in enumerate(value)]


def item_id(kind: str, name: str) -> str:
    """The id of an item whose place has that name."""
    return f"{IDS[kind]}_{blake2b(name.encode(), digest_size=16).hexdigest()}"


def write_items(items: Sequence[Mapping[str, Any]], writer: ChatWriter, path: str = "input") -> None:
    """Adds the items, which came as `path`, to a chat. What the model has thought before is not told again.

    Raises InvalidArgument if a picture of earlier ones was not kept.
    """
    for i, item in enumerate(items):
        where = f"{path}[{i}]" if path == "input" else ""
        match item["type"]:
            case "message":
                parts = _written(item["content"], where and f"{where}.content", path)
                writer.add(ROLES.get(item["role"], item["role"]), parts)
            case "function_call":
                writer.add_call(item["call_id"], item["name"], item["arguments"])
            case "function_call_output":
                output = item["output"]
                parts = [output] if isinstance(output, str) else _written(output, where and f"{where}.output", path)
                writer.add_result(item["call_id"], parts)


def _written(parts: Sequence[Mapping[str, Any]], where: str, path: str) -> list[Part]:
    return [
        picture_of(part, f"{where}[{i}].image_url" if where else path)
        if part["type"] == PICTURE
        else str(part[TEXTS[part["type"]]])
        for i, part in enumerate(parts)
    ]


def _read_item(item: Any, path: str, name: str) -> Item:
    if not isinstance(item, dict):
        raise InvalidArgument(path, "must be an object")
    fields = FieldReader(item, path=f"{path}.")
    kind = fields.take_text("type") or "message"
    given = fields.take_text("id")
    if len(given) > limits.MAX_REQUEST_ID_CHARS:
        fields.refuse("id", f"has more than {limits.MAX_REQUEST_ID_CHARS} characters")
    fields.take_ignored(IGNORED)
    if kind not in IDS:
        raise InvalidArgument(f"{path}.type", f"items of type {kind[:40]!r} are not supported; leave it out")
    read = {"id": given or item_id(kind, name), "type": kind, **_OF[kind](fields, path)}
    fields.refuse_rest()
    fields.checks.raise_found()
    return read


def _message(fields: FieldReader, path: str) -> Item:
    role, content = fields.take_text("role"), fields.take_any("content")
    if role not in MESSAGE_ROLES:
        fields.refuse("role", f"must be one of {', '.join(MESSAGE_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    parts = fields.checks.run(_parts, content, f"{path}.content", kind)
    return {"role": role, "status": "completed", "content": parts or []}


def _parts(content: Any, path: str, kind: str) -> list[Item]:
    """A content as parts."""
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list) or len(content) > MAX_LISTED:
        raise InvalidArgument(path, f"must be a text or a list of at most {MAX_LISTED} parts")
    return [_part(part, f"{path}[{i}]", kind) for i, part in enumerate(content)]


def _part(part: Any, path: str, kind: str) -> Item:
    found = part.get("type") if isinstance(part, dict) else None
    if found == PICTURE and kind == "input_text":
        return read_picture(part, path)
    if not isinstance(found, str) or found not in TEXTS:
        raise InvalidArgument(path, f"parts of type {str(found)[:40]!r} are not supported; send text")
    if found == "refusal":
        return {"type": found, "refusal": checked_text(f"{path}.refusal", part.get("refusal"))}
    more: Item = {"annotations": []} if kind == "output_text" else {}
    return {"type": kind, "text": checked_text(f"{path}.text", part.get("text")), **more}


def _call(fields: FieldReader, path: str) -> Item:
    read = {name: fields.take_text(name) for name in ("call_id", "name", "arguments")}
    for name, value in read.items():
        if not value:
            fields.refuse(name, "is missing")
    return {**read, "status": "completed"}


def _call_output(fields: FieldReader, path: str) -> Item:
    call_id, output = fields.take_text("call_id"), fields.take_any("output")
    if not call_id:
        fields.refuse("call_id", "is missing")
    fields.take_ignored(["name"])
    parts = fields.checks.run(_parts, output, f"{path}.output", "input_text") or []
    has_picture = any(part["type"] == PICTURE for part in parts)
    output = parts if has_picture else "\n".join(part[TEXTS[part["type"]]] for part in parts)
    return {"call_id": call_id, "output": output, "status": "completed"}


def _reasoning(fields: FieldReader, path: str) -> Item:
    """What the model has thought, as an earlier response had it."""
    content = fields.take_any("content")
    shown = fields.checks.run(_thoughts, [] if content is None else content, f"{path}.content") or []
    fields.take_ignored(["summary", "encrypted_content"])
    return {"summary": [], "content": shown}


def _thoughts(content: Any, path: str) -> list[Item]:
    if not isinstance(content, list) or len(content) > MAX_LISTED:
        raise InvalidArgument(path, f"must be a list of at most {MAX_LISTED} parts")
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    return [{"type": "reasoning_text", "text": checked_text(f"{path}[{i}]", text)} for i, text in enumerate(texts)]


_OF = {"message": _message, "function_call": _call, "function_call_output": _call_output, "reasoning": _reasoning}
