"""A router that does not end a call as it should."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc

from octavo.v1 import inference_pb2, inference_pb2_grpc, types_pb2

NUM_TOKENS = 24
SILENCE_S = 20.0
# What follows the terminal event: a bad status, nothing for `SILENCE_S` and then a bad status, or a broken connection;
# or a bad status follows every event.
Ending = Literal["status", "silence", "break", "stutter"]


@dataclass
class BreakingRouter(inference_pb2_grpc.InferenceServicer):
    """Answers each call with the rest of NUM_TOKENS tokens, and remembers which methods were called."""

    ending: Ending
    calls: list[str] = field(default_factory=list)

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateEvent]:
        self.calls.append("Generate")
        yield from self._answer(0, context)

    def Attach(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateEvent]:
        self.calls.append("Attach")
        yield from self._answer(int(request.resume_token), context)

    def _answer(self, start: int, context: Any) -> Iterator[inference_pb2.GenerateEvent]:
        left = threading.Event()
        context.add_callback(left.set)
        for index in range(start, NUM_TOKENS):
            yield event(index, index + 1)
            if self.ending == "stutter":
                break
        if start == NUM_TOKENS:
            yield event(start, start)
        if self.ending == "break":
            self.server.stop(None)
        elif self.ending == "silence":
            left.wait(SILENCE_S)
        context.abort(grpc.StatusCode.UNAVAILABLE, "this router dies")

    @contextmanager
    def serving(self) -> Iterator[str]:
        """The endpoint."""
        self.server = grpc.server(ThreadPoolExecutor(4))
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            self.server.stop(None).wait()


def event(start: int, end: int) -> inference_pb2.GenerateEvent:
    """With the tokens from `start` to `end`."""
    made = inference_pb2.GenerateEvent(
        first_index=start, token_ids=range(start, end), text="a" * (end - start), resume_token=str(end).encode()
    )
    if end == NUM_TOKENS:
        made.finish_reason = types_pb2.FINISH_REASON_LENGTH
        made.finished.usage.output_tokens = NUM_TOKENS
    return made
