"""POST /v1/chat/completions: messages for the model's chat template, and how the assistant answers."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from octavo.request.chat_messages import shows_pictures, url_of_picture
from octavo.request.errors import InvalidArgument, ViolationCollector
from octavo.request.ids import new_request_id
from octavo.request.limits import MAX_CHAT_MESSAGES
from octavo.v1 import inference_pb2
from router.http.bodies.common_fields import SCORES, AskedAnswer, read_common, read_max_tokens
from router.http.bodies.field_reader import FieldReader, checked_text
from router.http.bodies.reasoning_fields import read_reasoning
from router.http.bodies.unknown_fields import refusal_of
from router.tools.asked_tools import NO_ARGUMENTS, AskedTools, read_choice

ID_PREFIX = "chatcmpl-"
# OpenAI has no default but the model's largest output. The queue counts what a request may come to: a context of 128 Ki
# tokens as the default would fill it with 60 requests.
DEFAULT_MAX_TOKENS = 4096
# What changes an answer only if it has other values than these.
HARMLESS: dict[str, tuple[list[object], str]] = {
    "modalities": ([["text"]], "only text is supported"),
    "verbosity": (["medium"], "is not supported; leave it out"),
    "function_call": (["none", "auto"], "is not supported; use tools"),
}


ROLES = {"developer": "system"}  # OpenAI's newer name of the role; templates know the older one
# Fields of a message that change no prompt: what an earlier answer said beside its content, which clients send back.
IGNORED = ("refusal", "annotations", "audio", "function_call")
MAX_LISTED = 1024  # parts of a content, tools or calls; the validator knows the limits


def read_chat(body: dict[str, Any]) -> AskedAnswer:
    """What the body asks for. Raises InvalidArgument with all that is wrong and can be seen without the model."""
    fields, request = FieldReader(body), inference_pb2.GenerateRequest()
    checks, sampling = fields.checks, request.sampling
    asked = read_common(fields, request)
    if not asked.chosen_id:
        request.request_id = ID_PREFIX + new_request_id()[2:]
    asked.tools = checks.run(_add_chat, fields, request.chat)
    asked.shows_reasoning = read_reasoning(fields, request.chat)
    if read_max_tokens(fields, sampling, "max_completion_tokens", "max_tokens") is None:
        sampling.max_tokens = DEFAULT_MAX_TOKENS
    asked.echo = fields.take_flag("echo")
    asked.scores = fields.take_flag("logprobs")
    top = fields.take_number("top_logprobs", SCORES)
    if top is not None and not asked.scores:
        fields.refuse("top_logprobs", "is allowed only beside logprobs: true")
    if asked.scores:
        sampling.logprobs = top or 0
    for name, (harmless, what) in HARMLESS.items():
        fields.take_harmless(name, harmless, what)
    fields.refuse_rest(refusal_of)
    checks.raise_found()
    return asked


def _add_chat(fields: FieldReader, chat: inference_pb2.Chat) -> AskedTools | None:
    """Adds the messages and the tools. Raises InvalidArgument with all that is wrong with them."""
    checks = ViolationCollector()
    checks.run(_add_each, chat.messages, _add_message, "messages", fields.take_any("messages"), MAX_CHAT_MESSAGES)
    chat.continue_final_message = fields.take_flag("continue_final_message")
    chat.add_generation_prompt = fields.take_flag("add_generation_prompt", default=not chat.continue_final_message)
    tools, choice = fields.take_any("tools"), fields.take_any("tool_choice")
    is_parallel = fields.take_flag("parallel_tool_calls", default=True)
    if tools is not None:
        checks.run(_add_each, chat.tools, _add_tool, "tools", tools, MAX_LISTED)
    schemas = {tool.name: tool.parameters_json or NO_ARGUMENTS for tool in chat.tools}
    asked = checks.run(read_choice, choice, schemas, is_parallel, strict_names(tools))
    checks.raise_found()
    if asked is None:
        del chat.tools[:]
    return asked


def _add_each(added: Any, add_one: Callable[..., None], field: str, listed: Any, most: int) -> None:
    """Adds each entry of a list to a field of the chat. Raises InvalidArgument with all that is wrong."""
    checks = ViolationCollector()
    for i, entry in enumerate(checked_list(field, listed, most)):
        checks.run(add_one, added.add(), entry, f"{field}[{i}]")
    checks.raise_found()


def checked_list(field: str, value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise InvalidArgument(field, f"must be a list of at most {most} entries")
    return value


def _fields_of(value: Any, path: str) -> FieldReader:
    if not isinstance(value, dict):
        raise InvalidArgument(path, "must be an object")
    return FieldReader(value, path=f"{path}.")


def _add_message(turn: inference_pb2.ChatMessage, message: Any, path: str) -> None:
    fields = _fields_of(message, path)
    role = fields.take_text("role")
    turn.role = ROLES.get(role, role)
    content = fields.take_any("content")
    if shows_pictures(content):
        fields.checks.run(_add_parts, turn, content, f"{path}.content")
    elif content is not None:
        turn.content = fields.checks.run(_content_text, content, f"{path}.content") or ""
    turn.name = fields.take_text("name")
    turn.tool_call_id = fields.take_text("tool_call_id")
    calls = fields.take_any("tool_calls")
    for i, call in enumerate(checked_list(f"{path}.tool_calls", [] if calls is None else calls, MAX_LISTED)):
        fields.checks.run(_add_call, turn.tool_calls.add(), call, f"{path}.tool_calls[{i}]")
    if content is None and not turn.tool_calls and "content" not in message:
        fields.refuse("content", "is missing; give a string, or a list of text parts")
    reasoning = [fields.take_text(name) for name in ("reasoning_content", "reasoning")]  # two names of the same
    turn.reasoning_content = next(filter(None, reasoning), "")
    fields.take_ignored(IGNORED)
    if rest := fields.take_rest():
        turn.extra_json = fields.checks.run(_json_text, rest, path) or ""
    fields.checks.raise_found()


def _content_text(content: Any, path: str) -> str:
    """The text of a content. Parts are joined by newlines."""
    if isinstance(content, str):
        return checked_text(path, content)
    return "\n".join(_part_text(part, f"{path}[{i}]") for i, part in enumerate(_parts(content, path)))


def _add_parts(turn: inference_pb2.ChatMessage, content: Any, path: str) -> None:
    """Adds texts and pictures in their order."""
    for i, part in enumerate(_parts(content, path)):
        where = f"{path}[{i}]"
        if (url := url_of_picture(part, where)) is None:
            turn.parts.add(text=_part_text(part, where))
        else:
            turn.parts.add(picture_url=checked_text(f"{where}.image_url", url))


def _parts(content: Any, path: str) -> Sequence[Any]:
    if not isinstance(content, list) or len(content) > MAX_LISTED:
        raise InvalidArgument(path, f"must be a string or a list of at most {MAX_LISTED} parts")
    return content


def _part_text(part: Any, path: str) -> str:
    if isinstance(part, dict) and part.get("type") in ("text", "refusal"):
        return checked_text(path, part.get(part["type"]))
    raise InvalidArgument(path, 'only parts of type text and image_url are supported: {"type": "text", "text": …}')


def _function_of(fields: FieldReader) -> FieldReader | None:
    """What a tool or a call says of its function."""
    function = fields.take_object("function")
    if function is None:
        fields.refuse("function", "is missing")
    return function


def _add_call(call: inference_pb2.ToolCall, value: Any, path: str) -> None:
    fields = _fields_of(value, path)
    fields.take_harmless("type", ["function"], "must be function")
    call.id = fields.take_text("id")
    fields.take_ignored(["index"])
    if function := _function_of(fields):
        call.name, call.arguments_json = function.take_text("name"), function.take_text("arguments")
        function.refuse_rest()
    fields.refuse_rest()
    fields.checks.raise_found()


def _add_tool(tool: inference_pb2.Tool, value: Any, path: str) -> None:
    fields = _fields_of(value, path)
    fields.take_harmless("type", ["function"], "must be function")
    if function := _function_of(fields):
        tool.name, tool.description = function.take_text("name"), function.take_text("description")
        parameters = function.take_any("parameters")
        if parameters is not None:
            tool.parameters_json = _json_text(parameters, f"{path}.function.parameters")
        function.take_flag("strict")
        function.refuse_rest()
    fields.refuse_rest()
    fields.checks.raise_found()


def strict_names(tools: Any) -> list[str]:
    """The names of the tools whose arguments must keep their schemas."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return [str(each["name"]) for each in functions if isinstance(each, dict) and each.get("strict") and "name" in each]


def _json_text(value: Any, path: str) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise InvalidArgument(path, "is nested too deep") from None
