"""Makes the text of a prompt from chat messages, by the model's template, so that no message can pose as another role.

The template is the model's, never a client's, and runs in jinja2's sandbox. Special tokens may come from the template
alone. A message that spells one is a forgery: `SpecialTokenGuard` disarms it before the template sees it.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import InvalidArgument

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
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise InvalidArgument("chat_template", f"the model's chat template does not compile: {error}") from error
        self._variables = dict(variables)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The conversation as the model was trained to see it. Raises InvalidArgument if the template refuses it."""
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._template.render(
                messages=turns,
                tools=None,
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

    def disarm_all(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, changed only where they spell special tokens.

        Raises InvalidArgument if a message is changed and one has stand-ins of its own.
        """
        disarmed = [(role, self.disarm(content)) for role, content in messages]
        if disarmed != list(messages) and not all(self._marks.isdisjoint(content) for _, content in messages):
            raise InvalidArgument(FIELD, "a special token and a Unicode noncharacter in one conversation")
        return disarmed

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


def _noncharacters() -> Sequence[str]:
    planes = [chr((plane << 16) + low) for plane in range(1, 17) for low in (0xFFFE, 0xFFFF)]
    return [chr(code) for code in range(0xFDD0, 0xFDF0)] + planes


class _GenerationTag(Extension):
    """Accepts {% generation %}, which marks for training what the assistant said. It does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that the templates published with models expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
