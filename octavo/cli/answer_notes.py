"""What `octavo generate` and `octavo chat` say on stderr of an answer that did not end by itself, or shows nothing."""

from collections.abc import Iterable

from octavo.client import Output
from octavo.request.limits import DEFAULT_MAX_TOKENS
from octavo.request.sampling import FinishReason, SamplingArguments


def notes(outputs: Iterable[Output], arguments: SamplingArguments) -> list[str]:
    """One line for each way in which branches were cut, and one if there are tokens without text."""
    outputs = list(outputs)
    found = {_note(output.finish_reason, len(output.token_ids), arguments.get("max_tokens")) for output in outputs}
    if any(output.token_ids and not output.text for output in outputs):
        found.add("the answer has tokens but no text: --json prints the token ids")
    return sorted(note for note in found if note)


def _note(reason: FinishReason, num_tokens: int, max_tokens: int | None) -> str:
    if reason == FinishReason.LENGTH:
        if max_tokens is None:
            whose = "the default" if num_tokens == DEFAULT_MAX_TOKENS else "the model's own limit or its context"
            return f"cut at {num_tokens} tokens, {whose}; --max-tokens sets another limit"
        if num_tokens < max_tokens:
            return f"cut after {num_tokens} tokens, where the model's context ends"
        return f"cut at max_tokens={max_tokens}; --max-tokens raises it"
    if reason == FinishReason.DEADLINE:
        return "cut at the deadline; --deadline raises it"
    return "cut: the request was cancelled" if reason == FinishReason.CANCELLED else ""
