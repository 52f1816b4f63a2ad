"""A router that follows a script: what it generates is an oracle, how it delivers it is the test's choice."""

import asyncio
import contextlib
import json
from collections import deque
from dataclasses import dataclass
from functools import partial

import grpc
import pytest

from octavo.net.server import make_server
from octavo.request import errors
from octavo.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from octavo.wire.public import ACCEPTED

NUM_TOKENS = 24


def token_text(index):
    return f"{index}é" * (index % 3)  # some have none


@dataclass
class Script:
    """What happens to one connection: `fault` before event number `at`."""

    at: int = 10**6
    fault: str = ""
    chunk: int = 2
    lag: int = 1  # text comes this many tokens after its token
    accepts: bool = False  # says so before the first event
    error: errors.ServingError | None = None  # refuse


class FakeRouter(inference_pb2_grpc.InferenceServicer):
    """One request of NUM_TOKENS tokens. Each call takes the next script; when there is none left, all goes well."""

    oracle = list(range(100, 100 + NUM_TOKENS)), "".join(map(token_text, range(NUM_TOKENS)))

    def __init__(self):
        self.scripts = deque()
        self.calls = []  # (method, request)
        self.attempts = []  # how many gRPC itself had made before, of each unary call
        self.accepted = set()
        self.cancelled = []
        self.failure = None
        self.finish_reason = types_pb2.FINISH_REASON_LENGTH
        for name in ("Cancel", "Get", "Tokenize", "Detokenize", "ListModels"):
            setattr(self, name, partial(self.unary, name))

    async def unary(self, name, request, context):
        self.calls.append((name, request))
        self.attempts.append(int(dict(context.invocation_metadata()).get("grpc-previous-rpc-attempts", 0)))
        script = self.scripts.popleft() if self.scripts else Script()
        if script.error:
            raise script.error
        if name == "Cancel":
            self.cancelled.append(request.request_id)
            return inference_pb2.CancelResponse()
        if name == "Get":
            return inference_pb2.GetResponse(request_id=request.request_id, state=inference_pb2.REQUEST_STATE_RUNNING)
        if name == "Tokenize":
            return inference_pb2.TokenizeResponse(token_ids=request.text.encode())
        if name == "Detokenize":
            return inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name="m", vocab_size=7)])

    def events(self, request_id, index, chars, script):
        _, text = self.oracle
        while True:
            end = min(index + script.chunk, NUM_TOKENS)
            ended = end == NUM_TOKENS
            visible = len(text) if ended else len("".join(map(token_text, range(max(end - script.lag, 0)))))
            visible = max(visible, chars)
            event = inference_pb2.GenerateEvent(
                request_id=request_id,
                first_index=index,
                token_ids=range(100 + index, 100 + end),
                text=text[chars:visible],
                resume_token=json.dumps([request_id, end, visible]).encode(),
            )
            if ended:
                event.finish_reason = self.finish_reason
                event.finished.usage.prompt_tokens = 3
                event.finished.usage.output_tokens = NUM_TOKENS
                if self.failure:
                    event.finished.failure.CopyFrom(self.failure)
            yield event
            if ended:
                return
            index, chars = end, visible

    async def play(self, context, request_id, index, chars):
        script = self.scripts.popleft() if self.scripts else Script()
        if script.error:
            raise script.error
        self.accepted.add(request_id)
        if script.accepts:
            await context.send_initial_metadata((ACCEPTED,))
            await asyncio.sleep(0.05)
        events = list(self.events(request_id, index, chars, script))
        at, fault = script.at, script.fault
        if at < len(events):
            if fault == "skip":
                del events[at]
            elif fault == "twice":
                events.insert(at, events[at])
            elif fault == "swap":
                events[at : at + 2] = events[at : at + 2][::-1]
            elif fault == "old":
                events[at:at] = events[: at // 2 + 1]
        for number, event in enumerate(events):
            if number == at and fault == "end":
                return
            if number == at and fault in grpc.StatusCode.__members__:
                await context.abort(grpc.StatusCode[fault], "as the script says")
            if number == at and fault == "hang":
                await asyncio.sleep(3600)
            yield event
        if at == len(events) and fault in grpc.StatusCode.__members__:
            await context.abort(grpc.StatusCode[fault], "as the script says")

    async def Generate(self, request, context):
        self.calls.append(("Generate", request))
        async for event in self.play(context, request.request_id, 0, 0):
            yield event

    async def Attach(self, request, context):
        self.calls.append(("Attach", request))
        if request.resume_token:
            request_id, index, chars = json.loads(request.resume_token)
        else:
            request_id = request.request_id
            index = request.next_indexes[0] if request.next_indexes else 0
            chars = len("".join(map(token_text, range(index))))
        if request_id not in self.accepted:
            raise errors.NotFound("no such request")
        async for event in self.play(context, request_id, index, chars):
            yield event


@pytest.fixture
def script():
    return Script


@pytest.fixture
def serve():
    """A context manager: FakeRouter on a free port of this machine -> "host:port"."""

    @contextlib.asynccontextmanager
    async def serving(router, port=0):
        server = make_server()
        inference_pb2_grpc.add_InferenceServicer_to_server(router, server)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)

    return serving


@pytest.fixture
def router():
    return FakeRouter()


@pytest.fixture
def make_router():
    return FakeRouter
