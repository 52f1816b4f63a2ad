"""The tokenizers of runners and models that have none: of bytes, and one that refuses text."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from octavo.request.errors import InvalidArgument, NoTokenizer
from octavo.text.detokenizer import ByteTable, Detokenizer

NAME = "octavo:bytes"  # where others say a path
NO_TEXT = ByteTable([])


class ByteTokenizer:
    """Of runners without a model: a token below 256 is one byte of UTF-8, others have no text.

    It has the interface of octavo.text.tokenizers.tokenizer.Tokenizer.
    """

    table = ByteTable([bytes([value]) for value in range(256)])
    vocab_size = 256
    eos_token_ids: tuple[int, ...] = ()
    has_chat_template = False
    chat_template = ""
    template_variables: Mapping[str, str] = {}
    has_text = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_whole(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_plain(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_frame(self, text: str) -> list[int]:
        return self.encode(text)

    def apply_chat(self, messages: object, *options: object, **named: object) -> list[int]:
        raise InvalidArgument("chat", "this model has no chat template: send text")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer()
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        return self.table.bytes_of(token_id)

    def token_id(self, text: str) -> int | None:
        return None

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        return Detokenizer(self.table)


class AbsentTokenizer(ByteTokenizer):
    """Of a model that takes token ids and answers with token ids: it refuses text, and no token has any."""

    table = NO_TEXT
    vocab_size = 0
    has_text = False

    def encode(self, text: str) -> NoReturn:
        raise no_tokenizer("send token_ids instead of text")

    def apply_chat(self, messages: object, *options: object, **named: object) -> NoReturn:
        raise no_tokenizer("send token_ids instead of chat")


def no_tokenizer(what: str) -> NoTokenizer:
    """The error for a request that needs text; `what` says what the client can do."""
    return NoTokenizer(
        f"this model has no tokenizer: {what}, or have it served with one "
        "(tokenizer.json beside its weights, or --tokenizer PATH of the router)"
    )
