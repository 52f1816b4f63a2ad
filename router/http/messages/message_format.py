"""The form of one message: the events of a stream, or one object."""

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from octavo.request.errors import Cancelled, DeadlineExceeded
from octavo.request.sampling import FinishReason
from octavo.v1 import types_pb2
from router.http.chats.output_parts import OutputParts
from router.http.messages.message_body import AskedMessage
from router.streaming.session import Session
from router.tools.parts import CallArguments, CallStart, Content, Part, Reasoning


class MessageFormat:
    """Makes the content blocks of one answer. The ids of calls are a function of the request and their place."""

    def __init__(self, asked: AskedMessage, session: Session) -> None:
        self._asked = asked
        self._request_id = asked.answer.request.request_id
        self._prompt_len = session.prompt_len
        self._model = asked.answer.request.model or session.model.name
        model = session.model
        self._output = OutputParts(model.text_stream(session.params), model.tokenizer, asked.answer.division)
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the text, or the arguments, of the block that is open
        self._is_open = False  # whether the last block may get more text

    def begin(self) -> bytes:
        """The first event."""
        usage = {"input_tokens": self._prompt_len, "output_tokens": 0, "cache_read_input_tokens": 0}
        return _event("message_start", {"message": self._message(None, None, usage)})

    def add(self, token_ids: Sequence[int], finish: int) -> bytes:
        """The events that tokens bring, and the end of the branch if it has one."""
        return b"".join(event for parts in self._output.push(token_ids, finish) for event in self._events(parts))

    def end(self, usage: types_pb2.Usage) -> bytes:
        """The last events. Raises what has ended the output before its time."""
        reason, stop = self._stop_reason()
        delta = {"stop_reason": reason, "stop_sequence": stop, "container": None}
        last = _event("message_delta", {"delta": delta, "usage": self._usage(usage)})
        return b"".join(self._close()) + last + _event("message_stop", {})

    def whole(self, usage: types_pb2.Usage) -> dict[str, Any]:
        """The whole message, after all tokens. Raises what has ended the output before its time."""
        reason, stop = self._stop_reason()
        list(self._close())
        return self._message(reason, stop, self._usage(usage))

    def _message(self, reason: str | None, stop: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks),
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": {"cache_creation_input_tokens": 0, **usage},
        }

    def _usage(self, usage: types_pb2.Usage) -> dict[str, Any]:
        """Tokens of the prompt that were cached are counted apart, as Anthropic's API has it."""
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        }

    def _stop_reason(self) -> tuple[str, str | None]:
        output = self._output
        match output.finish:
            case FinishReason.CANCELLED:
                raise Cancelled("the request was cancelled")
            case FinishReason.DEADLINE:
                raise DeadlineExceeded("the deadline passed before the answer was whole")
            case FinishReason.LENGTH:
                return "max_tokens", None
        if output.num_calls:
            return "tool_use", None
        return ("stop_sequence", output.stop_string) if output.stop_string else ("end_turn", None)

    # Blocks

    def _events(self, parts: Sequence[Part]) -> Iterator[bytes]:
        for part in parts:
            match part:
                case CallStart(name):
                    yield from self._begin_call(name)
                case CallArguments(text):
                    self._pieces.append(text)
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case Reasoning() if not self._asked.shows_thinking:
                    pass
                case Reasoning() | Content():
                    yield from self._add_text(part)

    def _add_text(self, part: Content | Reasoning) -> Iterator[bytes]:
        kind = "text" if isinstance(part, Content) else "thinking"
        if not (self._is_open and self._blocks[-1]["type"] == kind):
            block: dict[str, Any] = {"type": kind, kind: ""}
            yield from self._open({**block, "signature": ""} if kind == "thinking" else {**block, "citations": None})
        self._pieces.append(part.text)
        yield self._delta({"type": f"{kind}_delta", kind: part.text})

    def _begin_call(self, name: str) -> Iterator[bytes]:
        place = sum(block["type"] == "tool_use" for block in self._blocks)
        call = blake2b(f"{self._request_id}/{place}".encode(), digest_size=12).hexdigest()
        yield from self._open({"type": "tool_use", "id": f"toolu_{call}", "name": name, "input": {}})

    def _open(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._is_open = True
        yield _event("content_block_start", {"index": len(self._blocks), "content_block": block})
        self._blocks.append(dict(block))

    def _close(self) -> Iterator[bytes]:
        if self._is_open:
            self._is_open = False
            block, text = self._blocks[-1], "".join(self._pieces)
            self._pieces.clear()
            if block["type"] == "tool_use":
                block["input"] = input_of(text)
            else:
                block[block["type"]] = text
            yield _event("content_block_stop", {"index": len(self._blocks) - 1})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": len(self._blocks) - 1, "delta": delta})


def input_of(arguments: str) -> dict[str, Any]:
    """The input of a call; empty if the output was cut in the middle of it."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()
