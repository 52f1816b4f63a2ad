"""Counts tokens by a model's own tokenizer, for endpoints that do not count, and for prompts of an exact length."""

from collections.abc import Callable, Sequence

from octavo.process.command_error import CommandError
from octavo.request.errors import ServingError


class TokenCounter:
    """The tokenizer of a model folder or a GGUF file."""

    def __init__(self, encode: Callable[[str], Sequence[int]], vocab_size: int) -> None:
        self._encode = encode
        self.vocab_size = vocab_size

    def count(self, text: str) -> int:
        return len(self._encode(text))


def load_counter(path: str) -> TokenCounter:
    """The counter of `--tokenizer`. Raises CommandError if the files or the packages for them are missing."""
    try:
        from octavo.text.tokenizers.tokenizer import load_tokenizer
    except ImportError:
        raise CommandError("--tokenizer needs the package tokenizers: pip install 'octavo[bench]'") from None
    try:
        tokenizer = load_tokenizer(path)
    except ServingError as error:
        raise CommandError(f"--tokenizer: {error.message}") from None
    return TokenCounter(tokenizer.encode, tokenizer.vocab_size)
