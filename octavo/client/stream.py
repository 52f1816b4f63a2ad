"""The stream of one request, over as many connections as it needs."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Self, TypeAlias, cast

import grpc

from octavo.client.events import Completion, Event, Logprobs, StreamEnd, event_of, output_of
from octavo.client.receiver import BrokenStreamError, StreamReceiver
from octavo.client.routing import EndpointPool, Recovery
from octavo.request import errors
from octavo.v1 import inference_pb2
from octavo.wire.public import ACCEPTED

Opening = inference_pb2.GenerateRequest | inference_pb2.AttachRequest
Call: TypeAlias = "grpc.aio.UnaryStreamCall[Opening, inference_pb2.GenerateEvent]"


class AsyncStream(AsyncIterator[Event]):
    """The events of one request, each exactly once and in order, whichever processes die meanwhile.

    The stream ends after the terminal event. If that event carries a failure, the stream delivers it and then raises
    its error. A caller that leaves early (`aclose`, or `async with`) disconnects, which by default cancels the request
    after a grace time.
    """

    def __init__(self, endpoints: EndpointPool, opening: Opening, receiver: StreamReceiver, recovery: Recovery) -> None:
        self.request_id = opening.request_id
        self.num_reattaches = 0
        self._endpoints = endpoints
        self._opening = opening
        self._receiver = receiver
        self._recovery = recovery
        self._endpoint = endpoints.first()
        self._broken = False
        self._past_deadline = False
        self._refused_token = b""  # the store has another key by now
        self._events = self._run()

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def aclose(self) -> None:
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def resume_token(self) -> bytes:
        """A token with which another process can continue after the events that were delivered here."""
        return self._receiver.resume_token

    async def _run(self) -> AsyncGenerator[Event, None]:
        failure = None
        while not self._receiver.done:
            opened = time.monotonic()
            try:
                async with aclosing(self._connect()) as connection:
                    async for event in connection:
                        self.request_id = event.request_id or self.request_id
                        new = self._receiver.accept(event)
                        if new is not None:
                            self._recovery.progress()
                            yield new
                        failure = event.finished and event.finished.failure
                if not self._receiver.done:
                    raise BrokenStreamError("the stream ended without its terminal event")
            except (errors.ServingError, BrokenStreamError) as error:
                if not self._receiver.done:  # else the router died between the terminal event and the call's status
                    self._recovery.was_open_for(time.monotonic() - opened)
                    await self._recover(error)
        if failure:
            raise failure.error()

    async def _connect(self) -> AsyncGenerator[Event, None]:
        """The events of one connection. The call ends when the caller leaves the iteration."""
        call = self._call()
        try:
            if ACCEPTED[0] in dict(await call.initial_metadata() or ()):  # before a first event that may be late
                self._recovery.note_accepted()
            async for message in call:
                if self._broken:
                    self.num_reattaches += 1
                    self._broken = False
                if message is None:
                    raise self._endpoints.unreadable(self._endpoint)
                self._endpoints.note_answer(self._endpoint)
                yield event_of(message)
        except grpc.RpcError as error:
            raise self._endpoints.error_of(self._endpoint, error) from None
        finally:
            call.cancel()

    def _call(self) -> Call:
        attach = inference_pb2.AttachRequest
        stub = self._endpoints.stub(self._endpoint)
        deadline = self._recovery.deadline
        timeout = None if deadline is None else max(deadline - time.monotonic(), 0.001)
        if self._receiver.resume_token:
            self._receiver.resume()
            call = stub.Attach(self._place(), timeout=timeout)
        else:
            self._receiver.restart()
            if isinstance(self._opening, attach):
                call = stub.Attach(self._opening, timeout=timeout)
            elif self._past_deadline:
                call = stub.Attach(attach(request_id=self.request_id), timeout=timeout)
            else:
                call = stub.Generate(self._opening, timeout=timeout)
        return cast("Call", call)

    def _place(self) -> inference_pb2.AttachRequest:
        """Where the next connection begins: after the last token, or at the next indexes if that token was refused."""
        token, attach = self._receiver.resume_token, inference_pb2.AttachRequest
        if token != self._refused_token:
            return attach(resume_token=token)
        return attach(request_id=self.request_id, next_indexes=self._receiver.next_indexes())

    async def _recover(self, error: errors.ServingError | BrokenStreamError) -> None:
        """Sleeps until the next connection is due. Raises the error if the stream is given up."""
        if isinstance(error, errors.DeadlineExceeded):
            self._fetch_the_rest(error)
            return
        token = self._receiver.resume_token
        was_refused = bool(token) and token == self._refused_token  # and the place was named by id and indexes
        if isinstance(error, errors.ForeignToken) and token and not was_refused and self._receiver.next_indexes():
            self._refused_token = token
            return
        if isinstance(error, errors.NotFound) and was_refused:
            raise errors.HistoryLost("the store has lost the record of this request: start again") from error
        if isinstance(error, errors.NotFound) and self._past_deadline:
            raise errors.DeadlineExceeded("the deadline passed before the request was accepted") from error
        delay = self._recovery.delay_s(error)
        self._broken |= isinstance(error, errors.Unreachable | errors.Draining | BrokenStreamError)
        self._endpoint = self._endpoints.after(self._endpoint)
        await asyncio.sleep(delay)

    def _fetch_the_rest(self, error: errors.DeadlineExceeded) -> None:
        """Lets the stream attach once more for the last tokens: the deadline has ended call and request at once."""
        if self._past_deadline:
            raise error
        self._past_deadline = True
        self._recovery.deadline = time.monotonic() + self._recovery.policy.deadline_grace_s


async def collect(stream: AsyncStream) -> Completion:
    """The whole answer of a stream. Raises the error of the request if it failed."""
    branches: dict[int, list[Event]] = {}
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finished: StreamEnd | None = None
    async with stream:
        async for event in stream:
            branches.setdefault(event.branch, []).append(event)
            prompt_logprobs += event.prompt_logprobs
            finished = event.finished or finished
    if finished is None:
        raise errors.HistoryLost("the stream ended without its terminal event")
    outputs = tuple(output_of(branch, parts) for branch, parts in sorted(branches.items()))
    return Completion(stream.request_id, outputs, finished.usage, prompt_logprobs, stream.num_reattaches)
