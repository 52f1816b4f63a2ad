"""The marks between which a reasoning model thinks, as its tokenizer knows them."""

from dataclasses import replace

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams
from octavo.text.tokenizers.tokenizer import AnyTokenizer

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def with_thinking_marks(params: SamplingParams, tokenizer: AnyTokenizer) -> SamplingParams:
    """The parameters, in which a budget has the marks around what it counts. Raises InvalidArgument without any."""
    if params.thinking_budget is None or params.thinking_end_ids:
        return params
    for begin, end in MARKS:
        begin_id, end_id = tokenizer.token_id(begin), tokenizer.token_id(end)
        if begin_id is not None and end_id is not None:
            return replace(params, thinking_start_ids=(begin_id,), thinking_end_ids=(end_id,))
    what = "this model's tokenizer has no marks of thinking, such as <think>; leave it out, or send thinking_end_ids"
    raise InvalidArgument("thinking_budget", what)
