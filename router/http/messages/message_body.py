"""POST /v1/messages: what a body asks for, as a chat of octavo.v1."""

from dataclasses import dataclass, field
from typing import Any

from octavo.pictures.parts import Part, PicturePart
from octavo.request import limits
from octavo.request.errors import InvalidArgument
from octavo.request.ids import new_request_id
from octavo.request.limits import NumberRange
from octavo.v1 import inference_pb2
from router.http.bodies.common_fields import AskedAnswer, read_max_tokens
from router.http.bodies.constraint_fields import schema_text
from router.http.bodies.field_reader import FieldReader, checked_text, json_text
from router.http.chats.chat_writer import ChatWriter, checked_list, read_one_output, strict_names
from router.tools.asked_tools import read_choice

ID_PREFIX = "msg_"
MAX_LISTED = limits.MAX_CHAT_MESSAGES  # messages, blocks of a content, tools; the validator knows the limits
THOUGHTS = ("thinking", "redacted_thinking")  # blocks of earlier answers that no prompt has again
BUDGETS = NumberRange(0, limits.U32_MAX, integer=True)
PICTURE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")  # as Anthropic has them
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# What changes an answer only if it has other values than these.
HARMLESS: dict[str, tuple[list[object], str]] = {
    "container": ([], "is not supported; leave it out"),
    "mcp_servers": ([[]], "are not supported; call them in your program, and send tools"),
    "stop": ([], "is called stop_sequences here"),
}
IGNORED = (
    "service_tier",
    "inference_geo",
    "cache_control",
    "betas",
    "speed",
    "user_profile_id",
    "workspace_id",
    "diagnostics",
)


@dataclass(slots=True)
class AskedMessage:
    """One request of a client."""

    answer: AskedAnswer
    shows_thinking: bool = False
    budget: int | None = None  # tokens that the model may think, if it can be held to that
    places: dict[str, str] = field(default_factory=dict)  # where the body has what the chat has, if the names differ


def read_message(body: dict[str, Any], *, counts_only: bool = False) -> AskedMessage:
    """What the body asks for. Raises InvalidArgument with all that is wrong and can be seen without the model.

    With `counts_only` the body needs no `max_tokens`.
    """
    fields, request = FieldReader(body), inference_pb2.GenerateRequest()
    checks, sampling = fields.checks, request.sampling
    stops = fields.take_any("stop_sequences")
    for name, (harmless, what) in HARMLESS.items():
        fields.take_harmless(name, harmless, what)
    checks.run(_add_stops, sampling, stops)
    asked = AskedMessage(read_one_output(fields, request))
    if not asked.answer.chosen_id:
        request.request_id = ID_PREFIX + new_request_id()[2:]
    writer = ChatWriter(request.chat)
    checks.run(_add_system, writer, fields.take_any("system"))
    checks.run(_add_messages, writer, fields.take_any("messages"))
    writer.finish()
    asked.places = writer.places
    checks.run(_add_tools, writer, fields, asked)
    if read_max_tokens(fields, sampling, "max_tokens") is None and not counts_only:
        fields.refuse("max_tokens", "is missing; say how many tokens the answer may have")
    _read_thinking(fields, asked)
    _read_output(fields, asked.answer)
    fields.take_ignored(IGNORED)
    fields.refuse_rest()
    checks.raise_found()
    return asked


def _add_stops(sampling: Any, stops: Any) -> None:
    for i, stop in enumerate(checked_list("stop_sequences", stops, MAX_LISTED)):
        if not checked_text(f"stop_sequences[{i}]", stop):
            raise InvalidArgument(f"stop_sequences[{i}]", "is empty; leave it out")
        sampling.stop.append(stop)


def _listed(path: str, value: Any) -> list[Any]:
    if value is None:
        raise InvalidArgument(path, "is missing")
    return checked_list(path, value, MAX_LISTED)


def _add_system(writer: ChatWriter, system: Any) -> None:
    if system is not None and (text := _text_of(system, "system")):
        writer.add_text("system", text)


def _text_of(content: Any, path: str) -> str:
    """The text of a content that may have nothing else. Blocks are joined by newlines."""
    if isinstance(content, str):
        return checked_text(path, content)
    texts = []
    for i, block in enumerate(_listed(path, content)):
        texts.append(_block_text(_object(block, f"{path}[{i}]"), f"{path}[{i}]"))
    return "\n".join(texts)


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument(path, "must be an object")
    return value


def _block_text(block: dict[str, Any], path: str) -> str:
    kind = block.get("type")
    if kind == "text":
        return checked_text(f"{path}.text", block.get("text"))
    raise InvalidArgument(path, f"blocks of type {str(kind)[:40]!r} are not supported here; send text")


def _add_messages(writer: ChatWriter, messages: Any) -> None:
    role = ""
    for i, message in enumerate(_listed("messages", messages)):
        path = f"messages[{i}]"
        fields = FieldReader(_object(message, path), path=f"{path}.")
        role, content = fields.take_text("role"), fields.take_any("content")
        if role not in ("user", "assistant", "system"):
            fields.refuse("role", "must be user or assistant; the system's text goes into system")
        fields.refuse_rest()
        fields.checks.raise_found()
        if isinstance(content, str):
            writer.add_text(role, checked_text(f"{path}.content", content))
            continue
        for k, block in enumerate(_listed(f"{path}.content", content)):
            where = f"{path}.content[{k}]"
            _add_block(writer, role, _object(block, where), where)
    if role == "assistant":
        raise InvalidArgument("messages", "the last one must be the user's: no answer of the assistant is continued")


def _add_block(writer: ChatWriter, role: str, block: dict[str, Any], path: str) -> None:
    match role, block.get("type"):
        case "assistant", "tool_use":
            call_id, name = (checked_text(f"{path}.{key}", block.get(key)) for key in ("id", "name"))
            arguments = _object(block.get("input"), f"{path}.input")
            writer.add_call(call_id, name, json_text(arguments, f"{path}.input"))
        case "user", "tool_result":
            parts = _result_parts(block.get("content"), f"{path}.content")
            writer.add_result(checked_text(f"{path}.tool_use_id", block.get("tool_use_id")), parts)
        case "assistant", kind if kind in THOUGHTS:
            pass
        case "user", "image":
            writer.add(role, [_picture(block, path)])
        case _:
            writer.add_text(role, _block_text(block, path))


def _result_parts(content: Any, path: str) -> list[Part]:
    """What a tool has answered: a text, or blocks of text and pictures."""
    if content is None or isinstance(content, str):
        return [checked_text(path, content or "")]
    parts: list[Part] = []
    for i, each in enumerate(_listed(path, content)):
        where = f"{path}[{i}]"
        block = _object(each, where)
        parts.append(_picture(block, where) if block.get("type") == "image" else _block_text(block, where))
    return parts


def _picture(block: dict[str, Any], path: str) -> PicturePart:
    path = f"{path}.source"
    fields = FieldReader(_object(block.get("source"), path), path=f"{path}.")
    kind = fields.take_text("type")
    if kind not in ("base64", "url"):
        raise InvalidArgument(f"{path}.type", "must be base64 or url: no files are kept here")
    if kind == "base64":
        media, name = fields.take_text("media_type"), "data"
        if media not in PICTURE_TYPES:
            fields.refuse("media_type", f"must be one of {', '.join(PICTURE_TYPES)}")
        before = f"data:{media};base64,"
    else:
        name, before = "url", ""
    given = fields.take_text(name)
    if not given:
        fields.refuse(name, "is missing")
    fields.refuse_rest()
    fields.checks.raise_found()
    return PicturePart(f"{path}.{name}", url=before + given)


def _add_tools(writer: ChatWriter, fields: FieldReader, asked: AskedMessage) -> None:
    listed, choice = fields.take_any("tools"), fields.take_any("tool_choice")
    for i, tool in enumerate(checked_list("tools", listed, MAX_LISTED)):
        _add_tool(writer, _object(tool, f"tools[{i}]"), f"tools[{i}]")
    word, is_parallel = _choice(choice)
    asked.answer.tools = read_choice(word, writer.schemas(), is_parallel, strict_names(listed or ()))
    if asked.answer.tools is None:
        writer.drop_tools()


def _add_tool(writer: ChatWriter, tool: dict[str, Any], path: str) -> None:
    fields = FieldReader(tool, path=f"{path}.")
    kind = fields.take_text("type") or "custom"
    if kind != "custom":
        raise InvalidArgument(f"{path}.type", f"{kind[:40]!r} is a tool that the server runs; send a tool of your own")
    name, description = fields.take_text("name"), fields.take_text("description")
    schema = fields.take_any("input_schema")
    fields.take_ignored(("cache_control", "strict", "eager_input_streaming", "input_examples"))
    fields.refuse_rest()
    fields.checks.raise_found()
    writer.add_tool(name, description, _object(schema, f"{path}.input_schema"), f"{path}.input_schema")


def _choice(choice: Any) -> tuple[Any, bool]:
    """`tool_choice` in OpenAI's words, and whether several calls may come."""
    if choice is None:
        return None, True
    fields = FieldReader(_object(choice, "tool_choice"), path="tool_choice.")
    kind, name = fields.take_text("type"), fields.take_text("name")
    is_parallel = not fields.take_flag("disable_parallel_tool_use")
    fields.refuse_rest()
    fields.checks.raise_found()
    if kind == "tool":
        return {"type": "function", "name": name}, is_parallel
    if kind not in CHOICES:
        raise InvalidArgument("tool_choice.type", "must be auto, any, tool or none")
    return CHOICES[kind], is_parallel


def _read_thinking(fields: FieldReader, asked: AskedMessage) -> None:
    thinking = fields.take_object("thinking")
    if thinking is None:
        return
    kind = thinking.take_text("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        thinking.refuse("type", "must be enabled, adaptive or disabled")
    asked.shows_thinking = kind in ("enabled", "adaptive")
    asked.budget = thinking.take_number("budget_tokens", BUDGETS)
    thinking.take_ignored(("display",))
    thinking.refuse_rest()


def _read_output(fields: FieldReader, answer: AskedAnswer) -> None:
    """Takes the form of the output, which Anthropic's API has in `output_config.format`."""
    config = fields.take_object("output_config")
    form = fields.take_object("output_format") if config is None else config.take_object("format")
    if config is not None:
        config.take_ignored(["effort"])
        config.refuse_rest()
    if form is None:
        return
    sampling, path = answer.request.sampling, f"output_{'format' if config is None else 'config.format'}.schema"
    if sampling.HasField("constraint"):
        form.refuse("type", "is not allowed beside structured_outputs or response_format: leave out one of them")
    form.take_harmless("type", ["json_schema"], "must be json_schema")
    schema = form.take_any("schema")
    if isinstance(schema, dict):
        sampling.constraint.json_schema, answer.form_path = schema_text(path, schema), path
    else:
        form.refuse("schema", "must be an object")
    form.refuse_rest()
