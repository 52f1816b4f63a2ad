"""Log probabilities as OpenAI's two APIs show them: by the texts of tokens.

A token whose bytes are no whole characters is shown as bytes:\\xNN…, one without a text as token_id:N.
"""

import math
from collections.abc import Sequence
from typing import Any

from octavo.text.tokenizer import AnyTokenizer
from octavo.v1 import types_pb2

LEAST = -9999.0  # for minus infinity, which JSON does not have


def shown_logprob(value: float) -> float:
    return value if math.isfinite(value) else LEAST


def shown_token(token_id: int, data: bytes) -> str:
    """The name of a token that stands for these bytes."""
    if not data:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionScores:
    """Log probabilities of one branch in the form of completions."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0  # characters of the branch's text before the next token

    def shown(self, scores: Sequence[types_pb2.Logprobs]) -> dict[str, Any]:
        """The next tokens of the branch with their log probabilities."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for score in scores:
            chosen = score.chosen
            logprob = shown_logprob(chosen.logprob)
            top = {self._name(entry.token_id): shown_logprob(entry.logprob) for entry in score.top}
            self._add(found, chosen.token_id, logprob, {**top, self._name(chosen.token_id): logprob})
        return found

    def shown_prompt(self, prompt: Sequence[int], scores: Sequence[types_pb2.Logprobs]) -> dict[str, Any]:
        """The tokens of the prompt, which stand before all others. The first has no log probability."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        self._add(found, prompt[0], None, None)
        for name, values in self.shown(scores).items():
            found[name] += values
        return found

    def _add(self, found: dict[str, list[Any]], token_id: int, logprob: float | None, top: Any) -> None:
        found["tokens"].append(self._name(token_id))
        found["token_logprobs"].append(logprob)
        found["top_logprobs"].append(top)
        found["text_offset"].append(self._offset)
        self._offset += len(self._tokenizer.token_bytes(token_id).decode(errors="replace"))

    def _name(self, token_id: int) -> str:
        return shown_token(token_id, self._tokenizer.token_bytes(token_id))


def shown_chat_scores(tokenizer: AnyTokenizer, scores: Sequence[types_pb2.Logprobs]) -> dict[str, Any]:
    """Log probabilities in the form of chat completions."""

    def shown(entry: types_pb2.TokenLogprob) -> dict[str, Any]:
        data = tokenizer.token_bytes(entry.token_id)
        name = shown_token(entry.token_id, data)
        return {"token": name, "logprob": shown_logprob(entry.logprob), "bytes": list(data) if data else None}

    content = [{**shown(score.chosen), "top_logprobs": [shown(entry) for entry in score.top]} for score in scores]
    return {"content": content, "refusal": None}
