"""How tokens and their log probabilities are written, and those of a prompt in vLLM's shape."""

import math
from collections.abc import Sequence
from typing import Any

from octavo.text.tokenizers.tokenizer import AnyTokenizer
from octavo.v1 import types_pb2

LEAST = -9999.0  # for minus infinity, which JSON does not have


def shown_logprob(value: float) -> float:
    return value if math.isfinite(value) else LEAST


def shown_token(token_id: int, data: bytes) -> str:
    """The name of a token: bytes:\\xNN… where its bytes are no whole characters, token_id:N where it has none."""
    if not data:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def shown_prompt_scores(tokenizer: AnyTokenizer, scores: Sequence[types_pb2.Logprobs]) -> list[dict[str, Any] | None]:
    """For each token of the prompt an object by token ids: that token, and the likeliest ones. None for the first.

    `rank` is 1 for the likeliest token. It is None for a token of the prompt that is not among those asked for.
    """

    def entry(token: types_pb2.TokenLogprob, rank: int | None) -> dict[str, Any]:
        text = tokenizer.token_bytes(token.token_id).decode(errors="replace")
        return {"logprob": shown_logprob(token.logprob), "rank": rank, "decoded_token": text}

    shown: list[dict[str, Any] | None] = [None]
    for score in scores:
        of_token = {str(score.chosen.token_id): entry(score.chosen, None)}
        of_token |= {str(each.token_id): entry(each, place) for place, each in enumerate(score.top, 1)}
        shown.append(of_token)
    return shown
