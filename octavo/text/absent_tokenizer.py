"""Stands for the tokenizer of a model that has none: such a model takes token ids and answers with token ids."""

from collections.abc import Sequence
from typing import NoReturn

from octavo.request.errors import NoTokenizer
from octavo.text.detokenizer import ByteTable, Detokenizer

NO_TEXT = ByteTable([])


class AbsentTokenizer:
    """Has the interface of octavo.text.tokenizer.Tokenizer. It refuses text; token ids have no text."""

    vocab_size = 0
    eos_token_ids: tuple[int, ...] = ()
    has_chat_template = False
    has_text = False

    def encode(self, text: str) -> NoReturn:
        raise no_tokenizer("send token_ids instead of text")

    def apply_chat(self, messages: object, *options: object, **named: object) -> NoReturn:
        raise no_tokenizer("send token_ids instead of chat")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer whose text is empty."""
        return Detokenizer(NO_TEXT)


def no_tokenizer(what: str) -> NoTokenizer:
    """The error for a request that needs text; `what` says what the client can do."""
    return NoTokenizer(
        f"this model has no tokenizer: {what}, or have it served with one "
        "(tokenizer.json beside its weights, or --tokenizer PATH of the router)"
    )
