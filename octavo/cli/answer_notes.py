"""What `octavo generate` and `octavo chat` say on stderr of an answer that did not end by itself."""

from collections.abc import Iterable

from octavo.client import Output
from octavo.limits import DEFAULT_MAX_TOKENS
from octavo.sampling import FinishReason, SamplingParams


def notes(outputs: Iterable[Output], params: SamplingParams) -> list[str]:
    """One line for each way in which branches were cut."""
    found = (_note(output.finish_reason, len(output.token_ids), params) for output in outputs)
    return sorted({note for note in found if note})


def _note(reason: FinishReason, num_tokens: int, params: SamplingParams) -> str:
    if reason == FinishReason.LENGTH:
        limit = DEFAULT_MAX_TOKENS if params.max_tokens is None else params.max_tokens
        if num_tokens < limit:
            return f"cut after {num_tokens} tokens, where the model's context ends"
        default = ", the default" if params.max_tokens is None else ""
        return f"cut at max_tokens={limit}{default}; --max-tokens raises it"
    if reason == FinishReason.DEADLINE:
        return "cut at the deadline; --deadline raises it"
    return "cut: the request was cancelled" if reason == FinishReason.CANCELLED else ""
