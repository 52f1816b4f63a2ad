"""POST /v1/messages and /v1/messages/count_tokens, on the same sessions as all other answers."""

import asyncio

from starlette.types import Receive, Scope, Send

from octavo.request.ids import new_request_id
from octavo.text.thinking import thinking_marks
from octavo.text.tokenizers.tokenizer import AnyTokenizer
from router.http.answers import AnswerService, called, name_request, remaining_s, send_stream
from router.http.bodies.json_body import parse_object
from router.http.messages.message_body import AskedMessage, read_message
from router.http.messages.message_format import MessageFormat
from router.http.messages.message_reply import MessageReply
from router.streaming.inference_service import whole_answer
from router.streaming.prompts.chat_threads import run_aside
from router.streaming.session import Session


class MessageEndpoint:
    """Takes a body as a new request, and answers it, or says how many tokens its prompt has."""

    def __init__(self, service: AnswerService, *, counts_only: bool = False) -> None:
        self._service = service
        self._counts_only = counts_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = MessageReply(send, called(scope))
        reply.request_id = "req_" + new_request_id()[2:]  # until the body says another one
        async with reply:
            body = await self._service.bodies.read(scope, receive)
            asked = await run_aside(len(body), lambda: self._read(body, reply))
            if self._counts_only:
                await reply.send_object({"input_tokens": await self._count(asked)})
                return
            asked.answer.called = called(scope)
            name_request(asked.answer, scope, reply)
            await self._answer(asked, remaining_s(scope), reply)

    def _read(self, body: bytes, reply: MessageReply) -> AskedMessage:
        fields = parse_object(body, self._service.unknown_fields)
        asked = read_message(fields, counts_only=self._counts_only)
        reply.ignored, reply.places = fields.ignored, asked.places
        return asked

    async def _count(self, asked: AskedMessage) -> int:
        request, preparer = asked.answer.request, self._service.preparer
        await preparer.look_up(request)
        return len(await preparer.read_prompt(request, preparer.find_model(request)))

    async def _answer(self, asked: AskedMessage, remaining_s: float | None, reply: MessageReply) -> None:
        answer, service = asked.answer, self._service
        await service.divide(answer)
        limit_thinking(asked, service.preparer.find_model(answer.request).tokenizer)
        try:
            async with service.open(answer, remaining_s) as session:
                await send_message(session, MessageFormat(asked, session), answer.stream, reply)
        except asyncio.CancelledError:
            service.note_left(answer)
            raise


def limit_thinking(asked: AskedMessage, tokenizer: AnyTokenizer) -> None:
    """Holds the model to the budget, where it has marks of thinking and no form says each token already."""
    sampling = asked.answer.request.sampling
    is_free = not (sampling.HasField("constraint") or sampling.HasField("thinking_budget"))
    if asked.budget is not None and is_free and thinking_marks(tokenizer) is not None:
        sampling.thinking_budget = asked.budget


async def send_message(session: Session, form: MessageFormat, stream: bool, reply: MessageReply) -> None:
    """Sends all that the session brings. Raises what ends the request or the stream instead."""
    if not stream:
        whole = await whole_answer(session)
        form.add(whole.outputs[0].token_ids, whole.outputs[0].finish_reason)
        await reply.send_object(form.whole(whole.usage))
        return
    await reply.begin_stream()
    await reply.send_events(form.begin())
    await send_stream(
        session, reply, lambda events: b"".join(form.add(e.token_ids, e.finish_reason) for e in events), form.end
    )
