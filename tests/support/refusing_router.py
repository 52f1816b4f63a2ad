"""A router that refuses its first calls: what a client library makes of the retries in protos/service_config.json."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from octavo.v1 import inference_pb2, inference_pb2_grpc, types_pb2


@dataclass
class RefusingRouter:
    """Refuses `refusals` calls with `code`, and says how many attempts gRPC itself had made of each call it saw."""

    refusals: int
    code: grpc.StatusCode
    pushback_ms: int | None = None
    attempts: list[int] = field(default_factory=list)

    def _answer(self, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        self.attempts.append(int(metadata.get("grpc-previous-rpc-attempts", 0)))
        if len(self.attempts) <= self.refusals:
            if self.pushback_ms is not None:
                context.set_trailing_metadata((("grpc-retry-pushback-ms", str(self.pushback_ms)),))
            context.abort(self.code, "refused by the test")

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateEvent]:
        self._answer(context)
        yield inference_pb2.GenerateEvent(request_id=request.request_id, finished=inference_pb2.Finished())

    def Attach(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateEvent]:
        yield from self.Generate(request, context)

    def Complete(self, request: Any, context: Any) -> inference_pb2.CompleteResponse:
        self._answer(context)
        output = inference_pb2.Output(token_ids=[1, 2], finish_reason=types_pb2.FINISH_REASON_LENGTH)
        usage = types_pb2.Usage(prompt_tokens=1, output_tokens=2)
        return inference_pb2.CompleteResponse(request_id=request.request_id, outputs=[output], usage=usage)

    def __getattr__(self, method: str) -> Callable[[Any, Any], Any]:
        """All other methods, which answer nothing."""
        try:
            response = getattr(inference_pb2, f"{method}Response")
        except AttributeError:
            raise AttributeError(method) from None

        def answer(request: Any, context: Any) -> Any:
            self._answer(context)
            return response()

        return answer


@contextmanager
def refusing(
    refusals: int, code: grpc.StatusCode, pushback_ms: int | None = None
) -> Iterator[tuple[RefusingRouter, str]]:
    """The router, and its endpoint."""
    router = RefusingRouter(refusals, code, pushback_ms)
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield router, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
