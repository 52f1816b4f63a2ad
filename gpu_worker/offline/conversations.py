"""Conversations and tools of a caller of LLM.chat, in the form that chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from octavo.pictures.parts import Part, PicturePart, is_data_url, pictures_of, template_content, text_of
from octavo.request import limits, validation
from octavo.request.chat_messages import (
    ChatTurn,
    is_conversation,
    message_pairs,
    shows_pictures,
    text_of_part,
    url_of_picture,
)
from octavo.request.chat_tools import MessageDetails, Tool, ToolCall, details_for_template, tools_for_template
from octavo.request.errors import InvalidArgument

Conversations = Sequence[ChatTurn] | Sequence[Sequence[ChatTurn]]  # one, or many


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a call of `chat` says beside its messages, checked."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_call(
        cls,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> "ChatOptions":
        """The options that the arguments mean. Raises InvalidArgument."""
        if add_generation_prompt and continue_final_message:
            raise InvalidArgument("continue_final_message", "goes with add_generation_prompt=False alone")
        if variables is not None and not (
            isinstance(variables, Mapping) and all(isinstance(name, str) and name.isidentifier() for name in variables)
        ):
            raise InvalidArgument("chat_template_kwargs", "must be a dictionary of the template's variables")
        listed = _list("tools", tools)
        return cls(
            add_generation_prompt,
            continue_final_message,
            [_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed)],
            dict(variables or {}),
        )


@dataclass(frozen=True, slots=True)
class CheckedConversation:
    """The messages of one conversation as pairs of role and content, and the further fields of each."""

    messages: list[tuple[str, str]]
    details: list[dict[str, Any]]
    pictures: list[PicturePart] = field(default_factory=list)


def listed_conversations(messages: Conversations) -> Sequence[Sequence[ChatTurn]]:
    """The conversations of one call, which may come alone."""
    return cast("Sequence[Sequence[ChatTurn]]", [messages] if is_conversation(messages) else messages)


def check_conversation(turns: Sequence[ChatTurn], argument: str, context_tokens: int) -> CheckedConversation:
    """The conversation with its calls of tools and their results. Raises InvalidArgument, which names the place."""
    plain, details, shown = [], [], dict[int, list[Part]]()
    for i, turn in enumerate(turns if is_conversation(turns) else message_pairs(turns, argument)):
        bare, more = _parted(turn, f"{argument}[{i}]")
        if isinstance(bare, Mapping) and (parts := _parts_with_pictures(bare, f"{argument}[{i}].content")):
            shown[i] = parts
            bare = {**bare, "content": text_of(parts)}
        plain.append(bare)
        details.append(more)
    pairs = message_pairs(plain, argument)
    max_bytes = limits.MAX_TEXT_BYTES_PER_CONTEXT_TOKEN * context_tokens
    try:
        messages = validation.validate_chat(pairs, context_tokens=context_tokens)
        told = details_for_template(details, max_bytes=max_bytes)
    except InvalidArgument as error:
        raise InvalidArgument(argument, error.message) from None
    for i, parts in shown.items():
        told[i] = {**told[i], "content": template_content(parts)}
    return CheckedConversation(messages, told, [each for parts in shown.values() for each in pictures_of(parts)])


def _parts_with_pictures(turn: Mapping[str, object], path: str) -> list[Part]:
    """The parts of a content in which a picture is; else nothing."""
    content = turn.get("content")
    if not shows_pictures(content):
        return []
    return [_part(part, f"{path}[{i}]") for i, part in enumerate(cast("Sequence[object]", content))]


def _part(part: object, path: str) -> Part:
    url = url_of_picture(part, path)
    if url is None:
        return text_of_part(part, path)
    if not is_data_url(url):
        raise InvalidArgument(f"{path}.image_url", "must be data:image/png;base64,…: nothing is fetched here")
    return PicturePart(f"{path}.image_url", url=url)


def _parted(turn: ChatTurn, path: str) -> tuple[ChatTurn, MessageDetails]:
    """The role and the content of a message, and its further fields. A call of tools needs no content."""
    if not isinstance(turn, Mapping):
        return turn, MessageDetails()
    rest = dict(turn)
    calls = _list(f"{path}.tool_calls", rest.pop("tool_calls", None))
    details = MessageDetails(
        _text(f"{path}.name", rest.pop("name", None)),
        _text(f"{path}.tool_call_id", rest.pop("tool_call_id", None)),
        [_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)],
    )
    if calls and rest.get("content") is None:
        rest["content"] = ""
    return rest, details


def _call(value: object, path: str) -> ToolCall:
    function = _function(value, path)
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else _json(f"{path}.function.arguments", arguments)
    name = _text(f"{path}.function.name", function.get("name"))
    return ToolCall(_text(f"{path}.id", cast("Mapping[str, object]", value).get("id")), name, text)


def _tool(value: object, path: str) -> Mapping[str, Any]:
    function = _function(value, path)
    parameters = function.get("parameters")
    schema = "" if parameters is None else _json(f"{path}.function.parameters", parameters)
    name, description = (_text(f"{path}.function.{part}", function.get(part)) for part in ("name", "description"))
    try:
        return tools_for_template([Tool(name, description, schema)], max_bytes=limits.MAX_MESSAGE_BYTES)[0]
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}.function", error.message) from None


def _function(value: object, path: str) -> Mapping[str, object]:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidArgument(path, 'must be {"type": "function", "function": {"name": …}}')
    return function


def _list(path: str, value: object) -> Sequence[object]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise InvalidArgument(path, "must be a list")
    return value


def _text(path: str, value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidArgument(path, f"a {type(value).__name__} is no text")
    return value


def _json(path: str, value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        raise InvalidArgument(path, "is not JSON") from None
