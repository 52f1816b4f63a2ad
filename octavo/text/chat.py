"""Makes the text of a prompt from chat messages, by the model's template, so that no message can pose as another role.

The template is the model's, never a client's, and runs in a process of its own, with limits of time, memory and text.
Special tokens may come from the template alone. A message that spells one is a forgery: `SpecialTokenGuard` disarms it
before the template sees it.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, cast

from octavo.request.errors import InvalidArgument
from octavo.text.taught_tools import mentions_tools, with_tools
from octavo.text.template_renderer import RENDERERS, ModelTemplate, TemplateFault
from octavo.text.told_calls import CallForms, with_tools_in_messages

T = TypeVar("T")

FIELD = "chat.messages"
_CHAT_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
Message = tuple[str, str]  # role, content
_PROBE = "octavo"  # a content
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_SOURCE = 1 << 20  # characters of a template
_CODES = (*range(0xFDD0, 0xFDF0), *((plane << 16) + low for plane in range(1, 17) for low in (0xFFFE, 0xFFFF)))
NONCHARACTERS = [chr(code) for code in _CODES]  # of Unicode


class ChatTemplate:
    """A compiled chat template of a model."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables` are the values that templates expect beside the messages: bos_token, eos_token, …

        Raises InvalidArgument if the source does not compile.
        """
        if len(source) > MAX_SOURCE:
            raise InvalidArgument("chat_template", f"does not compile: it has more than {MAX_SOURCE} characters")
        self.source = source
        self._template = ModelTemplate(source, dict(variables))
        try:
            takes_tools = RENDERERS.takes_tools(self._template)
        except TemplateFault as fault:
            raise InvalidArgument("chat_template", f"the model's chat template does not compile: {fault}") from None
        self._forms = CallForms.of_template(source, takes_tools=takes_tools)
        self.takes_tools = takes_tools or self._forms.tools_in_messages
        self.takes_tool_calls = "tool_calls" in source
        self._takes_parts = "type" in source and not self._shows(_PROBE) and self._shows(_parts_of(_PROBE))

    def _shows(self, content: object) -> bool:
        """Whether the text of a chat has the content of its message."""
        turn = {"role": "user", "content": content}
        values = {"messages": [turn], "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return _PROBE in RENDERERS.render(self._template, values)
        except (TemplateFault, RecursionError):
            return False

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        details: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        continue_final_message: bool = False,
    ) -> str:
        """The conversation as the model was trained to see it. Raises InvalidArgument if the template refuses it.

        `details` has the further fields of each message, or nothing. Where the template has no place for tools or
        their calls, messages say them. `variables` are a caller's own, such as enable_thinking. A template that shows
        lists of parts alone, as those of models with pictures may, gets each text as one.
        With `continue_final_message`, the text ends with the last message's content, for the model to go on with it.
        """
        if mentions_tools(messages, tools, details):
            if self._forms.tools_in_messages:
                (messages, details), tools = with_tools_in_messages(messages, tools, details), ()
            elif not self.takes_tools:
                (messages, details), tools = with_tools(messages, tools, details), ()
        turns: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in messages]
        for i, (turn, more) in enumerate(zip(turns, self._forms.told(details), strict=False)):
            if "tool_calls" in more and not self.takes_tool_calls:
                place = f"{FIELD}[{i}].tool_calls"
                raise InvalidArgument(place, "this model's chat template has no place for them; leave them out")
            turn.update(more)
        if self._takes_parts:
            for turn in turns:
                turn["content"] = _parts_of(turn["content"]) if isinstance(turn["content"], str) else turn["content"]
        values = {
            **variables,
            "messages": turns,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = RENDERERS.render(self._template, values)
        except (TemplateFault, RecursionError) as error:
            raise InvalidArgument(FIELD, f"the model's chat template refused them: {error}") from None
        return cut_after(text, messages[-1][1]) if continue_final_message else text

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Refuses variables of a caller that would stand in the place of the chat's own, or that no JSON can hold."""
        try:
            json.dumps(dict(variables))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument("chat_template_kwargs", f"give values that JSON has: {error}") from None
        for name in variables:
            if name in _CHAT_VARIABLES or name in self._template.variables:
                raise InvalidArgument("chat_template_kwargs", f"{name} is not the caller's to set; leave it out")


def _parts_of(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def cut_after(text: str, content: str) -> str:
    """The text of a chat up to the end of its last message's content, which a template may have trimmed."""
    trimmed = content.strip()
    if not trimmed:
        raise InvalidArgument(FIELD, "the last message is empty; leave it out and set add_generation_prompt=True")
    start = text.rfind(trimmed)
    if start < 0:
        raise InvalidArgument(
            FIELD, "the model's chat template does not show the last message as it is, so it cannot be continued"
        )
    whole = content.lstrip()
    return text[: start + len(whole if text.startswith(whole, start) else trimmed)]


def check_messages(messages: Sequence[Message]) -> None:
    """Refuses roles that are not plain names: a template that writes <|role|> would let a role forge another marker."""
    if not messages:
        raise InvalidArgument(FIELD, "at least one message is needed")
    for index, (role, _) in enumerate(messages):
        if not _ROLE.fullmatch(role):
            raise InvalidArgument(f"{FIELD}[{index}].role", "1 to 64 letters, digits, '_', '.' or '-' are needed")


class SpecialTokenGuard:
    """Disarms special tokens in messages.

    A message may spell a special token, or begin one at its end. The first character of each is replaced by a stand-in:
    a Unicode noncharacter, one for each first character. The tokenizer puts the character back after it has looked for
    special tokens, so the model reads the client's text, as ordinary tokens.
    """

    def __init__(self, special_tokens: Collection[str]) -> None:
        firsts = sorted({token[0] for token in special_tokens if token})
        self.stand_ins = dict(zip(firsts, NONCHARACTERS, strict=False))
        if len(self.stand_ins) < len(firsts):
            raise InvalidArgument("chat_template", f"special tokens begin with over {len(self.stand_ins)} characters")
        self._marks = frozenset(self.stand_ins.values())
        self._beginnings = {token[:length] for token in special_tokens for length in range(1, len(token))}
        self._longest = max(map(len, special_tokens), default=0)
        spelled = "|".join(re.escape(token) for token in special_tokens if token)
        self._spelled = re.compile(f"(?={spelled})") if spelled else None  # so that overlaps are found

    def disarm_all(self, chat: T) -> T:
        """The chat, changed only where a text in it spells a special token; it may be lists, tuples and dictionaries.

        Raises InvalidArgument if a text is changed and one has stand-ins of its own.
        """
        disarmed = self._disarm_nested(chat)
        if disarmed != chat and not all(self._marks.isdisjoint(text) for text in _texts_in(chat)):
            raise InvalidArgument(FIELD, "a special token and a Unicode noncharacter in one conversation")
        return cast("T", disarmed)

    def _disarm_nested(self, value: object) -> object:
        if isinstance(value, str):
            return self.disarm(value)
        if isinstance(value, dict):
            return {self._disarm_nested(name): self._disarm_nested(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._disarm_nested(each) for each in value)
        return value

    def disarm(self, content: str) -> str:
        """The content of one message, disarmed. A content that has stand-ins already needs `disarm_all`."""
        if self._spelled is None:
            return content
        starts = {found.start() for found in self._spelled.finditer(content)} | self._begun(content)
        if not starts:
            return content
        characters = list(content)
        for start in starts:
            characters[start] = self.stand_ins[characters[start]]
        return "".join(characters)

    def _begun(self, content: str) -> set[int]:
        """The places near the end from which the content, as it is or trimmed, begins a special token.

        The text that the template puts after the content might complete that token.
        """
        starts = set()
        for text in {content, content.rstrip()}:
            for start in range(max(0, len(text) - self._longest), len(text)):
                if text[start:] in self._beginnings:
                    starts.add(start)
        return starts


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        inner = (*value, *value.values()) if isinstance(value, dict) else value
        for each in inner:
            yield from _texts_in(each)
