"""The parts of a tokenizer, as the reader of a folder or of a GGUF file finds them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import tokenizers


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """What octavo.text.tokenizer.Tokenizer is made from."""

    backend: tokenizers.Tokenizer  # with all added tokens, as the model's own files describe it
    tokens: Sequence[str | None]  # by id
    special_ids: frozenset[int]
    prefix_ids: tuple[int, ...] = ()  # before every text: the beginning-of-sequence token, if the model wants it
    eos_token_ids: tuple[int, ...] = ()
    template: str | None = None
    template_variables: dict[str, str] = field(default_factory=dict)
