"""Texts that no output contains, as runs of tokens: samplers know tokens, and the router has the tokenizer."""

from collections.abc import Sequence
from dataclasses import replace

from octavo.request import limits, sampling_validation
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import PARAMETERS, SamplingParams
from octavo.text.tokenizers.byte_tokenizer import no_tokenizer
from router.fleet.model_registry import ServedModel

FIELD = "bad_words"
MAX_WORDS = 512  # two runs of tokens for each, of the 1024 that a request may have


def check_words(words: Sequence[str]) -> None:
    """Raises InvalidArgument if there are too many, or one is empty or too long to be tokenized at once."""
    if len(words) > MAX_WORDS:
        raise InvalidArgument(FIELD, f"{len(words)} entries are too many; at most {MAX_WORDS}")
    for i, word in enumerate(words):
        if not word.strip() or len(word.encode()) > limits.MAX_STOP_BYTES:
            raise InvalidArgument(FIELD, f"entry {i} must be a word of 1 to {limits.MAX_STOP_BYTES} bytes")


def without_words(params: SamplingParams, words: Sequence[str], model: ServedModel) -> SamplingParams:
    """The parameters, by which no output has the tokens of a word, alone or after a space.

    Where an output ends with all tokens of a word but the last, the last does not come. Another division of the word
    into tokens may still spell it.
    """
    if not words:
        return params
    if not model.tokenizer.has_text:
        raise no_tokenizer("send banned_sequences instead of bad_words")
    forms = [form for i, word in enumerate(words) for form in forms_of(word, i, model)]
    banned = replace(params, banned_sequences=(*params.banned_sequences, *forms))
    most = PARAMETERS["banned_sequences"].most or 0
    if len(banned.banned_sequences) > most:
        raise InvalidArgument(FIELD, f"with banned_sequences these are more than {most} runs of tokens; leave some out")
    try:
        sampling_validation.validate_sampling(banned, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids)
    except InvalidArgument as error:
        raise InvalidArgument(FIELD, error.violations[0].description) from None
    return banned


def forms_of(word: str, place: int, model: ServedModel) -> list[tuple[int, ...]]:
    """The tokens of a word alone, and after a space."""
    plain, num_before = word.lstrip(), len(model.tokenizer.encode(""))
    forms = dict.fromkeys(tuple(model.tokenizer.encode(text)[num_before:]) for text in (plain, f" {plain}"))
    for form in forms:
        if len(form) > limits.MAX_BANNED_SEQUENCE_TOKENS:
            most = limits.MAX_BANNED_SEQUENCE_TOKENS
            raise InvalidArgument(FIELD, f"entry {place} is {len(form)} tokens of this model; at most {most}")
    return [form for form in forms if form]
