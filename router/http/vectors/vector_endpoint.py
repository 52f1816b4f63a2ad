"""An endpoint that takes a body as a call for vectors or scores, and answers with one object."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from octavo.request.ids import new_request_id
from router.http.answers import called, remaining_s
from router.http.bodies.field_reader import FieldReader
from router.http.bodies.json_body import BodyReader, parse_object
from router.http.bodies.unknown_fields import REFUSE
from router.http.reply import Reply
from router.pooling.pooling_calls import PoolingCalls, aside

Content = Callable[[], dict[str, Any]]  # makes the answer, of which much may take long
AnswerVectors = Callable[[PoolingCalls, FieldReader, float | None], Awaitable[tuple[int, Content]]]


@dataclass(eq=False)
class VectorEndpoint:
    """`answer` reads the fields, and returns how many numbers the answer has and what makes it."""

    calls: PoolingCalls
    bodies: BodyReader
    prefix: str  # of the answer's id
    answer: AnswerVectors
    unknown_fields: str = REFUSE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, called(scope))
        reply.request_id = self.prefix + new_request_id()[2:]
        async with reply:
            data = await self.bodies.read(scope, receive)
            body = await aside([data], lambda: parse_object(data, self.unknown_fields))
            size, content = await self.answer(self.calls, FieldReader(body), remaining_s(scope))
            reply.ignored = body.ignored
            name = {"id": reply.request_id}
            answer = await aside([range(size)], lambda: json.dumps(name | content()).encode())
            await reply.send_object(answer)
