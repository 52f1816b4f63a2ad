"""Several prompts in one completion: a request for each, and one answer that has the choices of all.

The first request has the name of the whole, and that of prompt i ends with -i. So a retry finds all of them again, and
the resume token of a chunk goes on with the request of its prompt.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from octavo.request.errors import ServingError
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import failure_from_wire
from router.http.answer_format import AnswerFormat
from router.http.answers import NewAnswer
from router.http.bodies.common_fields import AskedAnswer
from router.http.bodies.constraint_fields import form_named
from router.http.reply import Reply
from router.streaming.inference_service import whole_answer
from router.streaming.session import Session

MAX_WAITING = 64  # pieces of a stream that its client has not read


@dataclass(eq=False)
class SeveralAnswers(NewAnswer):
    """An endpoint whose body may have several prompts. All are accepted, or the whole is refused."""

    async def _answer(self, asked: AskedAnswer, remaining_s: float | None, reply: Reply) -> None:
        if not asked.more_prompts:
            await super()._answer(asked, remaining_s, reply)
            return
        parts = [asked, *(part_of(asked, i, prompt) for i, prompt in enumerate(asked.more_prompts, 1))]
        for part in parts:  # an error of the last one comes before the first one runs
            with form_named(part.form_path):
                await self.service.preparer.prepare(part.request)
        try:
            await self._answer_all(parts, remaining_s, reply)
        except asyncio.CancelledError:
            self._cancel_all(parts)
            raise

    def _cancel_all(self, parts: Sequence[AskedAnswer]) -> None:
        for part in parts:
            self.service.note_left(part)

    async def _answer_all(self, parts: Sequence[AskedAnswer], remaining_s: float | None, reply: Reply) -> None:
        async with AsyncExitStack() as stack:
            try:
                pairs = [await self._open(stack, parts, i, remaining_s) for i in range(len(parts))]
            except ServingError:
                self._cancel_all(parts)
                raise
            if parts[0].stream:
                await stream_all(pairs, reply)
            else:
                await reply.send_object(await whole_of_all(pairs))

    async def _open(
        self, stack: AsyncExitStack, parts: Sequence[AskedAnswer], place: int, remaining_s: float | None
    ) -> tuple[Session, AnswerFormat]:
        """The session for one of the prompts, and the form of its part of the answer."""
        part = parts[place]
        opening = self.service.open_undivided(part, remaining_s, whole_answer=not part.stream)
        session = await stack.enter_async_context(opening)
        form = self.form(parts[0], session.model, await self.service.shown_prompt(part, session))
        form.first_choice = place * (part.request.sampling.n or 1)
        return session, form


def part_of(asked: AskedAnswer, place: int, prompt: str | list[int]) -> AskedAnswer:
    """The request for one of the further prompts."""
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(asked.request)
    request.request_id = f"{asked.request.request_id}-{place}"
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(types_pb2.TokenIds(ids=prompt))
    return replace(asked, request=request)


async def whole_of_all(pairs: Sequence[tuple[Session, AnswerFormat]]) -> dict[str, Any]:
    """The answers as one: their choices in the order of the prompts, and the sums of what they used."""

    async def one(session: Session, form: AnswerFormat) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(form.whole(await whole_answer(session)))
        return found

    tasks = [asyncio.ensure_future(one(session, form)) for session, form in pairs]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)
    choices = [choice for answer in answers for choice in answer["choices"]]
    usage = answers[0]["usage"]
    for answer in answers[1:]:
        usage = summed(usage, answer["usage"])
    return answers[0] | {"choices": choices, "usage": usage}


def summed(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {
        name: summed(value, other[name]) if isinstance(value, dict) else value + other[name]
        for name, value in one.items()
    }


async def stream_all(pairs: Sequence[tuple[Session, AnswerFormat]], reply: Reply) -> None:
    """Sends the chunks of all as they come. Raises what ends one of them."""
    waiting: asyncio.Queue[bytes | types_pb2.Usage | Exception] = asyncio.Queue(MAX_WAITING)
    tasks = [asyncio.ensure_future(forward(session, form, waiting)) for session, form in pairs]
    total, num_ended = types_pb2.Usage(), 0
    try:
        await reply.begin_stream()
        while num_ended < len(pairs):
            piece = await waiting.get()
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, bytes):
                await reply.send_events(piece)
                continue
            num_ended += 1
            total.prompt_tokens += piece.prompt_tokens
            total.output_tokens += piece.output_tokens
            total.cached_tokens += piece.cached_tokens
        await reply.end_stream(pairs[0][1].last_chunk(total))
    finally:
        await end_all(tasks)


async def forward(
    session: Session, form: AnswerFormat, waiting: "asyncio.Queue[bytes | types_pb2.Usage | Exception]"
) -> None:
    """Puts the chunks of one session into the queue, and last its usage, or the error that ends it."""
    try:
        while events := await session.next_events():
            if data := form.chunks(events):
                await waiting.put(data)
            if events[-1].HasField("finished"):
                finished = events[-1].finished
                failed = finished.HasField("failure")
                await waiting.put(failure_from_wire(finished.failure).error() if failed else finished.usage)
                return
    except Exception as error:  # also a defect: the client must not wait for a stream that nobody fills
        await waiting.put(error)


async def end_all(tasks: "Sequence[asyncio.Future[Any]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
