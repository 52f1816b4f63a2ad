"""The marks between which a reasoning model thinks, as its tokenizer knows them."""

from dataclasses import replace

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams
from octavo.text.tokenizers.tokenizer import AnyTokenizer

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def thinking_marks(tokenizer: AnyTokenizer) -> tuple[int, int] | None:
    """The tokens with which thinking begins and ends; None if the tokenizer has none."""
    for begin, end in MARKS:
        begin_id, end_id = tokenizer.token_id(begin), tokenizer.token_id(end)
        if begin_id is not None and end_id is not None:
            return begin_id, end_id
    return None


def with_thinking_marks(params: SamplingParams, tokenizer: AnyTokenizer) -> SamplingParams:
    """The parameters, in which a budget has the marks around what it counts. Raises InvalidArgument without any."""
    if params.thinking_budget is None or params.thinking_end_ids:
        return params
    if (marks := thinking_marks(tokenizer)) is not None:
        return replace(params, thinking_start_ids=marks[:1], thinking_end_ids=marks[1:])
    what = "this model's tokenizer has no marks of thinking, such as <think>; leave it out, or send thinking_end_ids"
    raise InvalidArgument("thinking_budget", what)
