"""The parts of a tokenizer, which are read from a folder or from a GGUF file."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import tokenizers


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """The values that octavo.text.tokenizers.tokenizer.Tokenizer is made of."""

    backend: tokenizers.Tokenizer  # as the model's files describe it, with all added tokens
    tokens: Sequence[str | None]  # by id
    special_ids: frozenset[int]
    prefix_ids: tuple[int, ...] = ()  # put before every text: the beginning-of-sequence token, if the model wants one
    suffix_ids: tuple[int, ...] = ()  # put after a text that is whole, such as one whose vector is wanted
    eos_token_ids: tuple[int, ...] = ()
    template: str | None = None
    template_variables: dict[str, str] = field(default_factory=dict)
