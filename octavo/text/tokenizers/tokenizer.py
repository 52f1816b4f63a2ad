"""The tokenizer of a model: makes token ids of text and of chats, and text of token ids.

It is loaded from the model's folder or GGUF file and needs only the package `tokenizers`, so a router needs neither
torch nor numpy. A special token is one that the model treats as control. It is never made from a client's text, only
from token ids and by the model's chat template.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers

from octavo.model_files.gguf_parts import first_parts
from octavo.request.errors import InvalidArgument, Mismatch, NotFound, ServingError
from octavo.text.chat import ChatTemplate, Message, SpecialTokenGuard, check_messages
from octavo.text.detokenizer import Detokenizer, build_byte_table
from octavo.text.tokenizers import byte_tokenizer
from octavo.text.tokenizers.byte_tokenizer import AbsentTokenizer, ByteTokenizer
from octavo.text.tokenizers.folder import read_folder
from octavo.text.tokenizers.gguf_vocabulary import read_gguf
from octavo.text.tokenizers.parts import TokenizerParts


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """The tokenizer in a folder (tokenizer.json and its companions, or a single GGUF file) or in a GGUF file.

    Raises NotFound if there is none, and Mismatch if its kind is not supported.
    """
    path = Path(path)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return _made_of(path, read_folder)
    ggufs = first_parts(sorted(path.glob("*.gguf"))) if path.is_dir() else [path]
    if len(ggufs) == 1 and ggufs[0].is_file():
        return _made_of(ggufs[0], read_gguf)
    raise NotFound(f"tokenizer: {path} is neither a GGUF file nor a folder with tokenizer.json or one GGUF file")


def _made_of(path: Path, read_parts: Callable[[Path], TokenizerParts]) -> "Tokenizer":
    """The tokenizer of the parts in the files. Whatever is wrong with them is a Mismatch, or what `read_parts` says."""
    try:
        return Tokenizer(read_parts(path))
    except (ServingError, OSError, MemoryError):
        raise
    except BaseException as error:  # the package raises plain exceptions, and panics that are no exceptions
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise Mismatch(f"{path.name}: its tokenizer is broken: {type(error).__name__}: {str(error)[:300]}") from error


def open_tokenizer(source: str) -> "AnyTokenizer":
    """The tokenizer that a worker names: a path, byte_tokenizer.NAME, or nothing if its model has none.

    Raises what `load_tokenizer` raises.
    """
    if not source:
        return AbsentTokenizer()
    return ByteTokenizer() if source == byte_tokenizer.NAME else load_tokenizer(source)


class Tokenizer:
    """A tokenizer. Several threads may use it at once."""

    has_text = True

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self.vocab_size = len(parts.tokens)  # the model may have more rows than that
        self.tokens = parts.tokens  # by id; None: the id has none
        self.eos_token_ids = parts.eos_token_ids
        self.special_ids = parts.special_ids
        self.special_tokens = {token: i for i in sorted(parts.special_ids) if (token := parts.tokens[i])}
        self._plain = _copy(parts.backend, parts.special_ids)
        self._plain.encode_special_tokens = True
        decoder = parts.backend.decoder
        self._pieces = build_byte_table(json.loads(decoder.__getstate__()) if decoder else None, parts.tokens)
        self._pieces_without_special = self._pieces.without(parts.special_ids)
        self._chat = ChatTemplate(parts.template, parts.template_variables) if parts.template else None
        self._guard = SpecialTokenGuard(self.special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    @property
    def template_with_tools(self) -> str:
        """The source of the chat template; empty if it has no place for tools."""
        return self._chat.source if self._chat is not None and self._chat.takes_tools else ""

    @property
    def chat_template(self) -> str:
        """The source of the chat template; empty if there is none."""
        return self._chat.source if self._chat is not None else ""

    @property
    def template_variables(self) -> Mapping[str, str]:
        """What the chat template gets beside the chat, such as the texts of special tokens by their names."""
        return self._parts.template_variables

    def encode(self, text: str) -> list[int]:
        """The ids of a text, after the beginning-of-sequence token if the model wants one.

        A special token that the text spells is ordinary text.
        """
        return [*self._parts.prefix_ids, *self._plain.encode(text, add_special_tokens=False).ids]

    def encode_whole(self, text: str) -> list[int]:
        """The ids of a text to which nothing is added: after them is what tokenizer.json puts after a text."""
        return [*self.encode(text), *self._parts.suffix_ids]

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text alone. A special token that it spells is ordinary text."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def encode_frame(self, text: str) -> list[int]:
        """The ids of octavo's own text, in which special tokens are special."""
        ids: list[int] = self._parts.backend.encode(text, add_special_tokens=False).ids
        return ids

    def apply_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        details: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        continue_final_message: bool = False,
    ) -> list[int]:
        """The ids of a conversation of (role, content), by the model's chat template.

        `tools`, `details` (the further fields of each message) and `variables` are as templates expect them. A special
        token that a text spells is ordinary text. Raises InvalidArgument if the model has no template, or no place for
        tools.
        """
        if self._chat is None:
            raise InvalidArgument("chat", "this model has no chat template; send text or token ids")
        check_messages(messages)
        contents = [content for _, content in messages]
        self._chat.check_variables(variables)
        chat = (contents, list(tools), list(details), dict(variables))
        disarmed = self._guard.disarm_all(chat)
        turns = [(role, content) for (role, _), content in zip(messages, disarmed[0], strict=True)]
        text = self._chat.render(turns, add_generation_prompt, *disarmed[1:], continue_final_message)
        backend = self._parts.backend if disarmed == chat else self._guarded
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        except TypeError:  # half a character, which a template can make by its number
            raise InvalidArgument("chat.messages", "the model's chat template made what is no Unicode text") from None
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary have no text."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, special tokens included; none beyond the vocabulary."""
        return self._pieces.bytes_of(token_id)

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written so; None if there is none."""
        return self._parts.backend.token_to_id(text)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A new detokenizer, for one stream."""
        return Detokenizer(self._pieces_without_special if skip_special_tokens else self._pieces)

    @cached_property
    def _guarded(self) -> tokenizers.Tokenizer:
        """The tokenizer for disarmed text: it puts back the characters that the guard has replaced.

        It looks for special tokens only before that, in the raw text, so that it never finds a disarmed one.
        """
        backend = _copy(self._parts.backend, self._parts.special_ids, raw_special=True)
        restore = [normalizers.Replace(mark, char) for char, mark in self._guard.stand_ins.items()]
        own = [backend.normalizer] if backend.normalizer else []
        backend.normalizer = normalizers.Sequence([*restore, *own])
        return backend


def _copy(
    backend: tokenizers.Tokenizer, special_ids: frozenset[int], raw_special: bool = False
) -> tokenizers.Tokenizer:
    """A tokenizer that shares the model of `backend`, and in which exactly `special_ids` are special."""
    copy = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        setattr(copy, part, getattr(backend, part))
    added = backend.get_added_tokens_decoder()
    tokens = []
    for token_id in sorted(added):
        token, special = added[token_id], token_id in special_ids
        tokens.append(
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized and not (raw_special and special),
                special=special,
            )
        )
    copy.add_tokens(tokens)
    return copy


AnyTokenizer = Tokenizer | ByteTokenizer
