"""The tokenizer for runners without a model (fake and witness): a token below 256 is one byte of UTF-8."""

from collections.abc import Sequence

from octavo.request.errors import InvalidArgument
from octavo.text.detokenizer import ByteTable, Detokenizer

NAME = "octavo:bytes"  # where others say a path
BYTE_TABLE = ByteTable([bytes([value]) for value in range(256)])


class ByteTokenizer:
    """Has the interface of octavo.text.tokenizer.Tokenizer. Ids above 255 have no text."""

    vocab_size = 256
    eos_token_ids: tuple[int, ...] = ()
    has_chat_template = False
    has_text = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat(self, messages: object, *options: object, **named: object) -> list[int]:
        raise InvalidArgument("chat", "this model has no chat template: send text")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer()
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        return BYTE_TABLE.bytes_of(token_id)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        return Detokenizer(BYTE_TABLE)
