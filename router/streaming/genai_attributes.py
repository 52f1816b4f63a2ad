"""What OpenTelemetry's conventions for generative AI ask of a span, for tools that know no names of octavo's.

Stop strings, seeds that nobody gave and, as everywhere, prompts and outputs are left out.
"""

from collections.abc import Sequence

from octavo.request.sampling import FinishReason, SamplingParams

PROVIDER = "octavo"
CHAT, TEXT_COMPLETION = "chat", "text_completion"

AttributeValue = str | int | float | tuple[str, ...]


def operation_of(field: str) -> str:
    """The name of what a request asks for, by the field of its prompt."""
    return CHAT if field == "chat" else TEXT_COMPLETION


def request_attributes(params: SamplingParams) -> dict[str, AttributeValue]:
    """The attributes of what a request asks for.

    Parameters that change nothing, such as a penalty of 0, are left out.
    """
    asked: dict[str, AttributeValue] = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    chosen: dict[str, float | int | None] = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.top_k": float(params.top_k),
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.choice.count": params.n if params.n != 1 else 0,
    }
    return asked | {name: value for name, value in chosen.items() if value}


def response_attributes(
    *,
    operation: str,
    model: str,
    request_id: str,
    input_tokens: int,
    cached_tokens: int,
    output_tokens: int,
    finishes: Sequence[FinishReason],
    error: str,
) -> dict[str, AttributeValue]:
    """What is known at the end. `finishes` is empty if the request goes on; `error` if it has not failed."""
    found: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request_id,
        "gen_ai.usage.input_tokens": input_tokens,
        "gen_ai.usage.cache_read.input_tokens": cached_tokens,
        "gen_ai.usage.output_tokens": output_tokens,
    }
    if finishes:
        found["gen_ai.response.finish_reasons"] = tuple(finish.name.lower() for finish in finishes)
    if error:
        found["error.type"] = error
    return found
