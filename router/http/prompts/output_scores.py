"""Log probabilities of outputs, in the two shapes of OpenAI."""

from collections.abc import Sequence
from typing import Any

from octavo.text.tokenizers.tokenizer import AnyTokenizer
from octavo.v1 import inference_pb2, types_pb2
from router.http.prompts.prompt_scores import shown_logprob, shown_token


class CompletionScores:
    """Log probabilities of one branch in the form of completions."""

    def __init__(self, tokenizer: AnyTokenizer, *, by_id: bool = False) -> None:
        """`by_id`: tokens are named by their ids."""
        self._tokenizer = tokenizer
        self._by_id = by_id
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
        return shown_token(token_id, b"" if self._by_id else self._tokenizer.token_bytes(token_id))


def shown_chat_scores(
    tokenizer: AnyTokenizer, scores: Sequence[types_pb2.Logprobs], *, by_id: bool = False
) -> dict[str, Any]:
    """Log probabilities in the form of chat completions. `by_id`: tokens are named by their ids."""

    def shown(entry: types_pb2.TokenLogprob) -> dict[str, Any]:
        data = tokenizer.token_bytes(entry.token_id)
        name = shown_token(entry.token_id, b"" if by_id else data)
        return {"token": name, "logprob": shown_logprob(entry.logprob), "bytes": list(data) if data else None}

    content = [{**shown(score.chosen), "top_logprobs": [shown(entry) for entry in score.top]} for score in scores]
    return {"content": content, "refusal": None}


def lacks_scores(sampling: types_pb2.SamplingParams, answer: inference_pb2.CompleteResponse) -> bool:
    """Whether log probabilities are missing: no journal has them, and no worker computes an ended request again."""
    if sampling.HasField("prompt_logprobs") and len(answer.prompt_logprobs) < answer.usage.prompt_tokens - 1:
        return True
    return sampling.HasField("logprobs") and any(
        len(output.logprobs) < len(output.token_ids) for output in answer.outputs
    )
