"""A model's tokenizer: text or chat to ids, ids to text.

Loaded from what the model came with, a folder or a GGUF file, and built on the `tokenizers` package alone, so that a
router needs neither torch nor numpy. A special token is one that the model treats as control: it is never made from a
client's text, only from token ids and from the model's chat template.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, normalizers

from octavo.errors import InvalidArgument, NotFound
from octavo.text.chat import ChatTemplate, Message, SpecialTokenGuard, check_messages
from octavo.text.detokenizer import Detokenizer, build_byte_table
from octavo.text.tokenizer_folder import read_folder
from octavo.text.tokenizer_gguf import read_gguf
from octavo.text.tokenizer_parts import TokenizerParts


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """The tokenizer in a folder (tokenizer.json and its companions, or a single GGUF file) or in a GGUF file.

    NotFound if there is none; Mismatch if it is of a kind that octavo cannot run.
    """
    path = Path(path)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return Tokenizer(read_folder(path))
    ggufs = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(ggufs) == 1 and ggufs[0].is_file():
        return Tokenizer(read_gguf(ggufs[0]))
    raise NotFound(f"tokenizer: {path} is neither a GGUF file nor a folder with tokenizer.json or one GGUF file")


class Tokenizer:
    """Safe to use from several threads."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self.vocab_size = len(parts.tokens)  # of the tokenizer; the model may have more rows than that
        self.eos_token_ids = parts.eos_token_ids
        self.special_ids = parts.special_ids
        self._special_tokens = [token for i in parts.special_ids if (token := parts.tokens[i])]
        self._plain = _copy(parts.backend, parts.special_ids)
        self._plain.encode_special_tokens = True
        decoder = parts.backend.decoder
        self._pieces = build_byte_table(json.loads(decoder.__getstate__()) if decoder else None, parts.tokens)
        self._pieces_without_special = self._pieces.without(parts.special_ids)
        self._chat = ChatTemplate(parts.template, parts.template_variables) if parts.template else None
        self._guard = SpecialTokenGuard(self._special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str) -> list[int]:
        """The ids of a text. A special token spelled in it is text; the beginning-of-sequence token is added if the
        model wants one."""
        return [*self._parts.prefix_ids, *self._plain.encode(text, add_special_tokens=False).ids]

    def apply_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """The ids of a conversation of (role, content). Special tokens come from the model's template alone: one that
        a message spells is text."""
        if self._chat is None:
            raise InvalidArgument("chat", "this model has no chat template; send text or token ids")
        check_messages(messages)
        disarmed = self._guard.disarm_all(messages)
        text = self._chat.render(disarmed, add_generation_prompt)
        backend = self._parts.backend if disarmed == list(messages) else self._guarded
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD, ids beyond the vocabulary nothing."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh stream."""
        return Detokenizer(self._pieces_without_special if skip_special_tokens else self._pieces)

    @cached_property
    def _guarded(self) -> tokenizers.Tokenizer:
        """Puts the characters back that the guard has replaced, after special tokens have been found.

        Special tokens are looked for in the raw text alone here, or a disarmed one would be found after all.
        """
        backend = _copy(self._parts.backend, self._parts.special_ids, raw_special=True)
        restore = [normalizers.Replace(mark, char) for char, mark in self._guard.stand_ins.items()]
        own = [backend.normalizer] if backend.normalizer else []
        backend.normalizer = normalizers.Sequence([*restore, *own])
        return backend


def _copy(
    backend: tokenizers.Tokenizer, special_ids: frozenset[int], raw_special: bool = False
) -> tokenizers.Tokenizer:
    """Another tokenizer on the same model, which is shared, in which exactly `special_ids` are special."""
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
