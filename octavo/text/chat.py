"""Makes the text of a prompt from chat messages, by the model's template, so that no message can pose as another role.

The template is the model's, never a client's, and runs in a sandbox with a budget. Special tokens may come from the
template alone. A message that spells one is a forgery: `SpecialTokenGuard` disarms it before the template sees it.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar, cast

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from octavo.errors import InvalidArgument
from octavo.text.template_budget import budgeted, size_of
from octavo.text.template_sandbox import TemplateSandbox

T = TypeVar("T")

FIELD = "chat.messages"
Message = tuple[str, str]  # role, content
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# What a template can raise when messages do not suit it: its own exception, or one of an expression in it.
_TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


class ChatTemplate:
    """A compiled chat template of a model."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables` are the values that templates expect beside the messages: bos_token, eos_token, …

        Raises InvalidArgument if the source does not compile.
        """
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except (
            TemplateError,
            SyntaxError,
            RecursionError,
            MemoryError,
            ValueError,
        ) as error:  # of jinja2, or of Python
            raise InvalidArgument("chat_template", f"the model's chat template does not compile: {error}") from error
        self.takes_tool_calls = "tool_calls" in source
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        details: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The conversation as the model was trained to see it. Raises InvalidArgument if the template refuses it.

        `details` has the further fields of each message, or nothing. Tools that the template has no place for are
        refused: the model would answer as if there were none.
        """
        if tools and not self.takes_tools:
            raise InvalidArgument("chat.tools", "this model's chat template has no place for tools; leave them out")
        turns: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in messages]
        for i, (turn, more) in enumerate(zip(turns, details, strict=False)):
            if "tool_calls" in more and not self.takes_tool_calls:
                place = f"{FIELD}[{i}].tool_calls"
                raise InvalidArgument(place, "this model's chat template has no place for them; leave them out")
            turn.update(more)
        try:
            with budgeted(size_of(turns) + size_of(tools)):
                return self._template.render(
                    messages=turns,
                    tools=list(tools) or None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._variables,
                )
        except _TEMPLATE_ERRORS as error:
            raise InvalidArgument(FIELD, f"the model's chat template refused them: {error}") from error


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
        self.stand_ins = dict(zip(firsts, _noncharacters(), strict=False))
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


def _noncharacters() -> Sequence[str]:
    planes = [chr((plane << 16) + low) for plane in range(1, 17) for low in (0xFFFE, 0xFFFF)]
    return [chr(code) for code in range(0xFDD0, 0xFDF0)] + planes


class _GenerationTag(Extension):
    """Accepts {% generation %}, which marks for training what the assistant said. It does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> TemplateSandbox:
    """The environment that the templates published with models expect."""
    environment = TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
