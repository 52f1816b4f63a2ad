"""GET, cancel and DELETE of /v1/responses/{id}, and its input items: on any router, by what the record says."""

import asyncio
import time
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from octavo.request.errors import InvalidArgument, NoWorkers
from octavo.v1 import inference_pb2
from router.http.answers import AnswerService, called
from router.http.responses.create_endpoint import events_of, send_events
from router.http.responses.input_pictures import shown
from router.http.responses.response_reply import ResponseReply
from router.http.responses.stored_responses import StoredResponse, StoredResponses

KNOWN = {"stream", "starting_after", "include", "include[]", "include_obfuscation", "limit", "order", "after"}
FLAGS = {"": True, "true": True, "1": True, "false": False, "0": False}
MAX_LISTED, USUAL = 100, 20  # input items in one answer, as OpenAI has them
CANCEL_S, LOOK_S = 10.0, 0.05  # how long an answer waits for the end of what it cancels, and how often it looks


class StoredEndpoint:
    """The endpoint of accepted responses. `what` is what stands after the id in the path."""

    def __init__(self, service: AnswerService, what: str = "") -> None:
        self._service = service
        self._stored = StoredResponses(service)
        self._what = what

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, response_id = ResponseReply(send, called(scope)), scope["path_params"]["response_id"]
        reply.name_request(response_id)
        async with reply:
            query = query_of(scope)
            if self._what == "cancel":
                await reply.send_object((await self._cancel(response_id)).shown)
            elif self._what == "input_items":
                notes = await self._stored.stored_notes(response_id)
                await reply.send_object(listed(shown(notes.input), query))
            elif scope["method"] == "DELETE":
                await self._delete(response_id)
                await reply.send_object({"id": response_id, "object": "response", "deleted": True})
            elif FLAGS.get(query.get("stream", "false")):
                await self._continue(response_id, number_of(query, "starting_after", -1, 2**53), reply)
            else:
                await reply.send_object((await self._stored.find(response_id)).shown)

    async def _continue(self, response_id: str, after: int, reply: ResponseReply) -> None:
        """Sends the events after a number, also of a response that is not stored: its stream goes on."""
        notes = await self._stored.notes(response_id)
        request = inference_pb2.AttachRequest(request_id=response_id)
        async with self._service.opener.open_accepted(request) as session:
            await send_events(session, events_of(response_id, notes, session, after), reply)

    async def _cancel(self, response_id: str) -> StoredResponse:
        """Cancels the response, and shows its end. One that has ended stays as it is."""
        await self._end(response_id)
        return await self._stored.find(response_id)

    async def _end(self, response_id: str) -> None:
        """Cancels the response if it has not ended, and waits for its end."""
        await self._stored.stored_notes(response_id)
        if await self._stored.has_ended(response_id):
            return
        await self._service.inference.Cancel(inference_pb2.CancelRequest(request_id=response_id))
        until = time.monotonic() + CANCEL_S
        while not await self._stored.has_ended(response_id):
            if time.monotonic() > until:
                raise NoWorkers("the response has been told to end and has not yet: retry", retry_after_ms=1000)
            await asyncio.sleep(LOOK_S)

    async def _delete(self, response_id: str) -> None:
        await self._end(response_id)
        await self._service.inference.store.forget(self._stored.sequence_of(response_id))


def query_of(scope: Scope) -> dict[str, str]:
    """The parameters in the query. Raises InvalidArgument for one that is not known."""
    try:
        found = parse_qs(scope["query_string"].decode(), keep_blank_values=True, max_num_fields=32)
    except ValueError:
        raise InvalidArgument("query", "cannot be read") from None
    if unknown := set(found) - KNOWN:
        raise InvalidArgument(min(unknown)[:64].encode("ascii", "replace").decode(), "is not supported; leave it out")
    if (flag := found.get("stream", ["false"])[-1]) not in FLAGS:
        raise InvalidArgument("stream", f"must be true or false, not {flag[:16]!r}")
    return {name: values[-1] for name, values in found.items()}


def number_of(query: dict[str, str], name: str, default: int, most: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= most):
        raise InvalidArgument(name, f"must be a number from 0 to {most}")
    return int(text)


def listed(items: list[dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
    """A page of the items, the last first unless the order is asc."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidArgument("order", "must be asc or desc")
    ordered = items if order == "asc" else items[::-1]
    limit = number_of(query, "limit", USUAL, MAX_LISTED) or 1
    place = next((i + 1 for i, item in enumerate(ordered) if item["id"] == query.get("after")), 0)
    page = ordered[place : place + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    has_more = place + limit < len(ordered)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}
