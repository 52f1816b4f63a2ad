"""GET and DELETE /v1/requests/{id}: goes on with the answer of a request, says where it is, or cancels it.

This is what a client does whose stream broke: the request runs on, on any router.
"""

import re
from base64 import urlsafe_b64decode
from binascii import Error as Base64Error
from typing import Any
from urllib.parse import parse_qs

from google.protobuf.json_format import MessageToDict
from starlette.types import Receive, Scope, Send

from octavo.request import limits
from octavo.request.errors import InvalidArgument
from octavo.v1 import inference_pb2
from router.http.answer_format import ChatFormat, CompletionFormat
from router.http.answers import AnswerService, called, send_answer
from router.http.bodies.chat_body import ID_PREFIX as CHAT_PREFIX
from router.http.bodies.common_fields import AskedAnswer
from router.http.reply import Reply
from router.streaming.inference_service import InferenceService
from router.streaming.session import Session
from router.tools.division_notes import read_notes

INDEXES = re.compile(r"\d{1,9}(,\d{1,9}){0,15}")
FLAGS = {"": True, "true": True, "1": True, "false": False, "0": False}
KNOWN = ("stream", "after", "wait", "chat")


class RequestEndpoint:
    """The endpoint of accepted requests."""

    def __init__(self, service: AnswerService, inference: InferenceService) -> None:
        self._service = service
        self._inference = inference

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, called(scope))
        async with reply:
            request_id = scope["path_params"]["request_id"]
            reply.name_request(request_id)
            if scope["method"] == "DELETE":
                await self._inference.Cancel(inference_pb2.CancelRequest(request_id=request_id))
                await reply.send_object({"id": request_id, "object": "request", "cancelled": True})
            else:
                await self._continue(request_id, query_of(scope), reply)

    async def _continue(self, request_id: str, query: dict[str, str], reply: Reply) -> None:
        stream, wait = flag_of(query, "stream", False), flag_of(query, "wait", True)
        if not (stream or wait):
            found = await self._inference.Get(inference_pb2.GetRequest(request_id=request_id))
            await reply.send_object({"id": request_id, "object": "request", **shown_record(found)})
            return
        if query.get("after") and not stream:
            raise InvalidArgument("after", "is allowed only beside stream=true")
        async with self._service.opener.open_accepted(attach_request(request_id, query.get("after", ""))) as session:
            names = self._service.preparer.adapter_names(session.model, session.lora)
            request = inference_pb2.GenerateRequest(request_id=request_id, model=names[0] if names else None)
            asked = AskedAnswer(request, stream, include_usage=True, lora=session.lora)
            asked.scores = session.params.logprobs is not None
            chat = flag_of(query, "chat", request_id.startswith(CHAT_PREFIX))
            form = await self._chat_format(asked, session) if chat else CompletionFormat(asked, session.model)
            await send_answer(session, form, stream, reply)

    async def _chat_format(self, asked: AskedAnswer, session: Session) -> ChatFormat:
        """Divides outputs as the router did that took the request, from what the client has already on."""
        tokenizer, notes = session.model.tokenizer, read_notes(await session.read_notes())
        division = self._service.forms.division(tokenizer, notes.tools, shows_reasoning=notes.shows_reasoning)
        history = await session.read_history() if division is not None else []
        if division is not None:
            division.begins_inside = notes.begins_inside
        if session.params.num_branches > session.params.n and history:
            division = None  # which branches these were is known only at the end
        asked.division = division
        form = ChatFormat(asked, session.model)
        for branch, (tokens, text) in enumerate(history):
            form.note_before(branch, tokens, text)
        return form


def query_of(scope: Scope) -> dict[str, str]:
    """The parameters in the query. Raises InvalidArgument for one that is not known, or comes twice."""
    try:
        found = parse_qs(
            scope["query_string"].decode(), keep_blank_values=True, max_num_fields=16, strict_parsing=False
        )
    except ValueError:
        raise InvalidArgument("query", "cannot be read") from None
    for name, values in found.items():
        if name not in KNOWN or len(values) != 1:
            raise InvalidArgument("query", f"may have one each of {', '.join(KNOWN)}")
    return {name: values[0] for name, values in found.items()}


def flag_of(query: dict[str, str], name: str, default: bool) -> bool:
    value = query.get(name)
    if value is None:
        return default
    if value not in FLAGS:
        raise InvalidArgument(name, "must be true or false")
    return FLAGS[value]


def attach_request(request_id: str, after: str) -> inference_pb2.AttachRequest:
    """`after`: the resume token of the last chunk that the client has, or how many tokens it has of each choice."""
    if INDEXES.fullmatch(after) or not after:
        indexes = [int(index) for index in after.split(",")] if after else []
        if not all(index <= limits.U32_MAX for index in indexes):
            raise InvalidArgument("after", "is no number of tokens")
        return inference_pb2.AttachRequest(request_id=request_id, next_indexes=indexes)
    try:
        token = urlsafe_b64decode(after.encode("ascii"))
    except (ValueError, Base64Error):
        raise InvalidArgument("after", "must be the resume_token of a chunk, or a number of tokens") from None
    return inference_pb2.AttachRequest(resume_token=token)


def shown_record(found: inference_pb2.GetResponse) -> dict[str, Any]:
    """The record of a request as JSON; its numbers are numbers, also those of 64 bits."""
    shown = MessageToDict(found, preserving_proto_field_name=True)
    shown.pop("request_id", None)
    shown["state"] = inference_pb2.RequestState.Name(found.state).removeprefix("REQUEST_STATE_").lower()
    shown["epoch"] = found.epoch
    for entry, timed in zip(shown.get("timeline", ()), found.timeline, strict=False):
        entry["after_ms"] = timed.after_ms
    return shown
