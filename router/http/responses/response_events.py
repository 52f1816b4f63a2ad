"""The response and its events: a function of its notes, its prompt and its tokens alone.

Each event has the number that it would have if every token had come alone. So any router gives the same event the same
number, and a client that names the last number it has gets exactly what is missing.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from octavo.request.errors import Failure
from octavo.request.sampling import FinishReason, SamplingParams
from router.fleet.model_registry import ServedModel
from router.http.chats.output_parts import OutputParts
from router.http.responses.input_items import Item, item_id
from router.http.responses.response_notes import ResponseNotes
from router.tools.parts import CallArguments, CallStart, Content, Part, Reasoning

TEXT_KINDS = {Content: ("message", "output_text"), Reasoning: ("reasoning", "reasoning_text")}
ENDS = {
    FinishReason.STOP: ("completed", None),
    FinishReason.LENGTH: ("incomplete", "max_output_tokens"),
    FinishReason.DEADLINE: ("incomplete", "deadline"),  # no word of OpenAI's: only who names a deadline meets it
    FinishReason.CANCELLED: ("cancelled", None),
    FinishReason.ERROR: ("failed", None),
}
NO_EVENTS = 2**63  # as `after`: only the response is wanted, and no event is made
LAST_EVENTS = {"completed": "response.completed", "failed": "response.failed"}  # all others: response.incomplete


class ResponseEvents:
    """Makes the events of one response, from the first on. Those up to the number `after` are left out."""

    def __init__(
        self,
        response_id: str,
        notes: ResponseNotes,
        model: ServedModel,
        params: SamplingParams,
        prompt_len: int,
        after: int = -1,
    ) -> None:
        self._id = response_id
        self._notes = notes
        self._prompt_len = prompt_len
        self._output = OutputParts(model.text_stream(params), model.tokenizer, notes.division())
        self._after = after
        self._next_number = 0
        self._items: list[Item] = []
        self._is_open = False  # whether the last item may get more
        self._pieces: list[str] = []  # of the text, or the arguments, of the last item while it is open
        self._failure: Failure | None = None
        self.cached_tokens = 0  # of the prompt, as the record says
        self.status = "queued" if notes.background else "in_progress"

    @property
    def output(self) -> list[Item]:
        """The items so far."""
        self._join()
        return self._items

    def begin(self) -> bytes:
        """The events before any token."""
        created = self._event("response.created", response=self.response)
        self.status = "in_progress"
        return created + self._event("response.in_progress", response=self.response)

    def add(self, token_ids: Sequence[int], finish: int, failure: Failure | None = None) -> bytes:
        """The events that tokens bring, and those of the end, if it has come."""
        found = [event for parts in self._output.push(token_ids, finish) for event in self._of_parts(parts)]
        if self._output.finish and self.status == "in_progress":
            self._failure = failure
            found += self._end(self._output.finish)
        return b"".join(found)

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        _, reason = ENDS.get(self._output.finish, ("", None))
        error = None if self._failure is None else {"code": "server_error", "message": self._failure.message}
        ended = self.status not in ("queued", "in_progress")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._notes.created_at,
            "status": self.status,
            "error": error,
            "incomplete_details": {"reason": reason} if reason is not None else None,
            "model": self._notes.model,
            "output": self.output,
            **self._notes.shown,
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        output = self._output
        return {
            "input_tokens": self._prompt_len,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output.num_tokens,
            "output_tokens_details": {"reasoning_tokens": output.num_reasoning_tokens},
            "total_tokens": self._prompt_len + output.num_tokens,
        }

    # Items

    def _of_parts(self, parts: Sequence[Part]) -> Iterator[bytes]:
        for part in parts:
            match part:
                case CallStart(name):
                    yield from self._begin_call(name)
                case CallArguments(text):
                    self._pieces.append(text)
                    yield self._of_item("response.function_call_arguments.delta", delta=text)
                case _:
                    yield from self._add_text(part)

    def _add_text(self, part: Content | Reasoning) -> Iterator[bytes]:
        kind, content = TEXT_KINDS[type(part)]
        if not (self._is_open and self._items[-1]["type"] == kind):
            yield from self._begin_text(kind, content)
        self._pieces.append(part.text)
        yield self._of_item(f"response.{content}.delta", content_index=0, delta=part.text, **scores_of(kind))

    def _begin_text(self, kind: str, content: str) -> Iterator[bytes]:
        yield from self._close("completed")
        own: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
        more: Item = {"annotations": []} if kind == "message" else {}
        part: Item = {"type": content, "text": "", **more, **scores_of(kind)}
        yield self._open({"type": kind, **own, "content": []})
        self._items[-1]["content"].append(part)
        yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _begin_call(self, name: str) -> Iterator[bytes]:
        yield from self._close("completed")
        call_id = item_id("function_call", f"{self._id}/call/{len(self._items)}").replace("fc_", "call_")
        yield self._open({"type": "function_call", "call_id": call_id, "name": name, "arguments": ""})

    def _open(self, item: Item) -> bytes:
        self._is_open = True
        name = item_id(item["type"], f"{self._id}/out/{len(self._items)}")
        self._items.append({"id": name, **item, "status": "in_progress"})
        return self._event("response.output_item.added", lambda: {"output_index": self._place, "item": self._items[-1]})

    def _close(self, status: str) -> Iterator[bytes]:
        if not self._is_open:
            return
        self._join()
        self._is_open = False
        self._pieces = []
        item = self._items[-1]
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=arguments)
        else:
            part = item["content"][0]
            scores, text = scores_of(item["type"]), part["text"]
            yield self._of_item(f"response.{part['type']}.done", content_index=0, text=text, **scores)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        yield self._event("response.output_item.done", lambda: {"output_index": self._place, "item": item})

    def _join(self) -> None:
        """Writes what has come into the item that is open."""
        if not self._is_open:
            return
        item, self._pieces = self._items[-1], ["".join(self._pieces)]
        if item["type"] == "function_call":
            item["arguments"] = self._pieces[0]
        elif item["content"]:
            item["content"][0]["text"] = self._pieces[0]

    def _end(self, finish: FinishReason) -> Iterator[bytes]:
        status, _ = ENDS[finish]
        if status == "completed" and not self._items:  # clients look for an item
            yield from self._begin_text("message", "output_text")
        yield from self._close("completed" if status == "completed" else "incomplete")
        self.status = status
        yield self._event(LAST_EVENTS.get(status, "response.incomplete"), response=self.response)

    # Events

    @property
    def _place(self) -> int:
        return len(self._items) - 1

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """An event of the last item."""
        return self._event(kind, lambda: {"item_id": self._items[-1]["id"], "output_index": self._place, **fields})

    def _event(self, kind: str, fields: Any = dict, *, response: Any = None) -> bytes:
        """The next event; empty if the client has it. Only then its fields are not made."""
        number = self._next_number
        self._next_number += 1
        if number <= self._after:
            return b""
        own = fields() if response is None else {"response": response()}
        data = json.dumps({"type": kind, "sequence_number": number, **own}, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {data}\n\n".encode()


def scores_of(kind: str) -> Item:
    """The place of the log probabilities of a text, which no record has."""
    return {"logprobs": []} if kind == "message" else {}
