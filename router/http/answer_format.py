"""The form of one answer: chunks of a stream, or one object.

A stream has one chunk per event of the session. What all chunks of an answer have in common is encoded once, and a
chunk without log probabilities is put together from bytes: one is made for each token that a router relays.
"""

import json
import time
from abc import ABC, abstractmethod
from binascii import b2a_base64
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, ClassVar

from octavo.request.errors import Unreachable
from octavo.v1 import inference_pb2, types_pb2
from router.fleet.model_registry import ServedModel
from router.http.bodies.common_fields import AskedAnswer
from router.http.prompts.output_scores import CompletionScores, lacks_scores, shown_chat_scores
from router.http.prompts.prompt_scores import shown_prompt_scores
from router.tools.harmony import HarmonyCounter
from router.tools.output_forms import Division
from router.tools.reasoning import ReasoningCounter
from router.tools.tool_message import ToolMessage

Event = inference_pb2.GenerateEvent

DONE = b"data: [DONE]\n\n"
# The last three are no words of OpenAI's: only clients that cancel, name a deadline, or meet a failure see them.
FINISHES: dict[int, str | None] = {
    types_pb2.FINISH_REASON_UNSPECIFIED: None,
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_CANCELLED: "cancelled",
    types_pb2.FINISH_REASON_DEADLINE: "deadline",
    types_pb2.FINISH_REASON_ERROR: "error",
}
FINISH_PARTS = {number: b',"finish_reason":' + json.dumps(word).encode() for number, word in FINISHES.items()}
NO_SCORES = b',"logprobs":null'
URL_SAFE = bytes.maketrans(b"+/", b"-_")


@dataclass(slots=True)
class ShownPrompt:
    """What an answer may show of its prompt."""

    num_tokens: int = 0
    token_ids: Sequence[int] = ()  # if the answer shows them, or the log probabilities of what it repeats
    text: str = ""  # what the answer repeats


class AnswerFormat(ABC):
    """Encodes one answer. The subclasses know what a choice looks like."""

    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]
    PROMPT_IN_CHOICES: ClassVar[bool] = False  # tokens and scores of the prompt stand in each choice, or beside them

    def __init__(self, asked: AskedAnswer, model: ServedModel, prompt: ShownPrompt | None = None) -> None:
        self.first_choice = 0  # the index of the first choice, where others stand before it
        self._asked = asked
        self._tokenizer = model.tokenizer
        self._prompt = prompt or ShownPrompt()
        self._prompt_scores: list[types_pb2.Logprobs] = []
        self._begun: set[int] = set()
        self._num_tokens: dict[int, int] = {}  # of each branch so far, where chunks tell it
        self._common = {
            "id": asked.request.request_id,
            "created": int(time.time()),
            "model": asked.request.model or model.name,
            "system_fingerprint": f"{model.fingerprint}-{asked.lora}" if asked.lora else model.fingerprint,
        }
        self._start = _dumped({"object": self.CHUNK, **self._common})[:-1]  # without the brace that closes it
        self._choice = b"data: " + self._start.replace(b"%", b"%%") + b',"choices":[{"index":%d,'
        self._end = b"}]" + (b',"usage":null' if asked.include_usage else b"")

    # A stream

    def chunks(self, events: Sequence[Event]) -> bytes:
        """The chunks of some events. Each has the token from which a stream goes on after it."""
        return b"".join([self._chunk(event) for event in events])

    def last_chunk(self, usage: types_pb2.Usage) -> bytes:
        """What comes after the last event."""
        if not self._asked.include_usage:
            return DONE
        return b"data: " + self._start + b',"choices":[],"usage":' + _dumped(self._usage(usage)) + b"}\n\n" + DONE

    def _chunk(self, event: Event) -> bytes:
        if event.prompt_logprobs:
            self._prompt_scores.extend(event.prompt_logprobs)
            if not event.token_ids and not event.finish_reason:
                return b""
        asked, branch = self._asked, event.branch
        is_first = branch not in self._begun
        if is_first:
            self._begun.add(branch)
        parts = [self._choice % (self.first_choice + branch), self._delta(event, is_first)]
        if asked.scores and (event.logprobs or is_first):
            parts.append(b',"logprobs":' + _dumped(self._scores(branch, self._shown(event.logprobs), is_first)))
        else:
            parts.append(NO_SCORES)
        if asked.token_ids:
            parts.append(b',"token_ids":' + _dumped(list(self._shown(event.token_ids))))
        token = b2a_base64(event.resume_token, newline=False).translate(URL_SAFE)
        is_plain = not asked.usage_in_chunks and not (asked.token_ids and is_first)
        end = self._end if is_plain else self._detailed_end(event, is_first)
        parts += (self._finish(event), end, b',"resume_token":"', token, b'"}\n\n')
        return b"".join(parts)

    def _detailed_end(self, event: Event, is_first: bool) -> bytes:
        """The end of a chunk that tells of its prompt or has a usage: the tokens of its choice so far."""
        asked, in_choice, beside, end = self._asked, b"", b"", self._end
        if asked.token_ids and is_first and (self.PROMPT_IN_CHOICES or len(self._begun) == 1):
            prompt = b',"prompt_token_ids":' + _dumped(self._prompt.token_ids)
            in_choice, beside = (prompt, b"") if self.PROMPT_IN_CHOICES else (b"", prompt)
        if asked.usage_in_chunks:
            num_prompt, before = self._prompt.num_tokens, self._num_tokens.get(event.branch, 0)
            num_output = self._num_tokens[event.branch] = before + len(self._shown(event.token_ids))
            counts = (num_prompt, num_output, num_prompt + num_output)
            end = b'}],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % counts
        return in_choice + end + beside

    @abstractmethod
    def _delta(self, event: Event, is_first: bool) -> bytes:
        """What a chunk has of the output."""

    def _finish(self, event: Event) -> bytes:
        """The reason why the event's branch has ended, after `_delta`."""
        return FINISH_PARTS[event.finish_reason]

    # One object

    def whole(self, answer: inference_pb2.CompleteResponse) -> bytes:
        """The whole answer. Raises Unreachable if the log probabilities that it must have are lost."""
        if not self._asked.chosen_id and lacks_scores(self._asked.request.sampling, answer):
            raise Unreachable(
                "the log probabilities are lost: their worker has died, or was out of reach as the request ended; retry"
            )
        self._prompt_scores.extend(answer.prompt_logprobs)
        choices = []
        in_choice, beside = self._prompt_shown(answer.prompt_logprobs)
        for index, output in enumerate(answer.outputs):
            scores = self._scores(index, self._shown(output.logprobs), True) if self._asked.scores else None
            text = "" if self._asked.no_output else output.text
            choice: dict[str, Any] = {
                "index": self.first_choice + index,
                "logprobs": scores,
                "finish_reason": FINISHES[output.finish_reason],
            }
            if self._asked.token_ids:
                choice["token_ids"] = list(self._shown(output.token_ids))
            choices.append(choice | in_choice | self._choice_of(text, index, output.finish_reason))
        usage = self._usage(answer.usage)
        return _dumped({"object": self.WHOLE, **self._common, "choices": choices, "usage": usage, **beside})

    def _prompt_shown(self, scores: Sequence[types_pb2.Logprobs]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is told of the prompt: in each choice of a completion, or beside a chat's, as vLLM has it."""
        shown: dict[str, Any] = {}
        if self._asked.token_ids:
            shown["prompt_token_ids"] = self._prompt.token_ids
        if self._asked.prompt_scores:
            shown["prompt_logprobs"] = shown_prompt_scores(self._tokenizer, scores)
        return (shown, {}) if self.PROMPT_IN_CHOICES else ({}, shown)

    @abstractmethod
    def _choice_of(self, text: str, index: int, finish: int) -> dict[str, Any]:
        """What one object has of an output."""

    # Both

    @abstractmethod
    def _scores(self, branch: int, scores: Sequence[types_pb2.Logprobs], is_first: bool) -> dict[str, Any]:
        """The log probabilities of tokens of an output."""

    def _after_prompt(self, text: str) -> str:
        """The beginning of an output, after what it repeats of the prompt."""
        return self._prompt.text + text

    def _shown(self, values: Sequence[Any]) -> Sequence[Any]:
        """What the client gets of an output: nothing, if it wants the prompt alone."""
        return () if self._asked.no_output else values

    def _usage(self, usage: types_pb2.Usage) -> dict[str, Any]:
        num_output = 0 if self._asked.no_output else usage.output_tokens
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": num_output,
            "total_tokens": usage.prompt_tokens + num_output,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }


class ChatFormat(AnswerFormat):
    """The form of chat completions."""

    WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: AskedAnswer, model: ServedModel, prompt: ShownPrompt | None = None) -> None:
        super().__init__(asked, model, prompt)
        self._division = asked.division
        self._messages: dict[int, ToolMessage] = {}
        self._counters: dict[int, ReasoningCounter | HarmonyCounter] = {}

    def _delta(self, event: Event, is_first: bool) -> bytes:
        role = b'"role":"assistant",' if is_first else b""
        text = self._after_prompt(event.text) if is_first else event.text
        if self._division is None:
            return b'"delta":{%b"content":%b}' % (role, encode_basestring(text).encode())
        self._count_reasoning(event.branch, event.token_ids)
        delta = self._message(self._division, event.branch).delta(text, event.finish_reason)
        return b'"delta":{' + (role + _dumped(delta)[1:-1]).rstrip(b",") + b"}"

    def note_before(self, branch: int, token_ids: Sequence[int], text: str) -> None:
        """Takes what the client of a stream that goes on has already."""
        if self._division is not None:
            self._count_reasoning(branch, token_ids)
            self._message(self._division, branch).delta(text, types_pb2.FINISH_REASON_UNSPECIFIED)

    def _finish(self, event: Event) -> bytes:
        if self._messages and self._ends_in_calls(event.branch, event.finish_reason):
            return b',"finish_reason":"tool_calls"'
        return super()._finish(event)

    def whole(self, answer: inference_pb2.CompleteResponse) -> bytes:
        for index, output in enumerate(answer.outputs):
            self._count_reasoning(index, output.token_ids)
        return super().whole(answer)

    def _choice_of(self, text: str, index: int, finish: int) -> dict[str, Any]:
        text = self._after_prompt(text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._division is None:
            return {"message": message}
        message |= self._message(self._division, index).whole(text, finish)
        calls = {"finish_reason": "tool_calls"} if self._ends_in_calls(index, finish) else {}
        return {"message": message, **calls}

    def _message(self, division: Division, branch: int) -> ToolMessage:
        found = self._messages.get(branch)
        if found is None:
            found = self._messages[branch] = division.message(str(self._common["id"]), branch)
        return found

    def _count_reasoning(self, branch: int, token_ids: Sequence[int]) -> None:
        division = self._division
        if division is None or division.reasoning is None:
            return
        counter = self._counters.get(branch)
        if counter is None:
            counter = self._counters[branch] = division.reasoning.counter(division.begins_inside)
        counter.add(map(self._tokenizer.token_bytes, token_ids))

    def _usage(self, usage: types_pb2.Usage) -> dict[str, Any]:
        found = super()._usage(usage)
        if self._division is None or self._division.reasoning is None:
            return found
        num_tokens = sum(counter.finish() for counter in self._counters.values())
        return {**found, "completion_tokens_details": {"reasoning_tokens": num_tokens}}

    def _ends_in_calls(self, branch: int, finish: int) -> bool:
        message = self._messages.get(branch)
        return message is not None and finish == types_pb2.FINISH_REASON_STOP and message.num_calls > 0

    def _scores(self, branch: int, scores: Sequence[types_pb2.Logprobs], is_first: bool) -> dict[str, Any]:
        return shown_chat_scores(self._tokenizer, scores, by_id=self._asked.tokens_by_id)


class CompletionFormat(AnswerFormat):
    """The form of completions."""

    WHOLE = CHUNK = "text_completion"
    PROMPT_IN_CHOICES = True

    def __init__(self, asked: AskedAnswer, model: ServedModel, prompt: ShownPrompt | None = None) -> None:
        super().__init__(asked, model, prompt)
        self._branch_scores: dict[int, CompletionScores] = {}

    def _delta(self, event: Event, is_first: bool) -> bytes:
        text = "" if self._asked.no_output else event.text
        if is_first:
            text = self._after_prompt(text)
        return b'"text":' + encode_basestring(text).encode()

    def _choice_of(self, text: str, index: int, finish: int) -> dict[str, Any]:
        return {"text": self._after_prompt(text)}

    def _scores(self, branch: int, scores: Sequence[types_pb2.Logprobs], is_first: bool) -> dict[str, Any]:
        shown = self._branch_scores.get(branch)
        if shown is None:
            shown = self._branch_scores[branch] = CompletionScores(self._tokenizer, by_id=self._asked.tokens_by_id)
        if not (is_first and self._asked.echo):
            return shown.shown(scores)
        prompt = shown.shown_prompt(self._prompt.token_ids, self._prompt_scores)
        output = shown.shown(scores)
        return {name: [*values, *output[name]] for name, values in prompt.items()}


def _dumped(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
