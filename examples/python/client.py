"""What an application does with octavo without its SDK: make run ENDPOINTS=127.0.0.1:50051,127.0.0.1:50052

Each part below prints one line at its end. ../README.md says what the lines mean. An application in Python is better
served by octavo.client, which does all of this; the example shows what the generated stubs alone can do.
"""

import itertools
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from octavo.v1 import inference_pb2, inference_pb2_grpc, types_pb2

SERVICE_CONFIG = Path(__file__).resolve().parents[2] / "protos" / "service_config.json"
OPTIONS = [
    ("grpc.service_config", SERVICE_CONFIG.read_text()),
    ("grpc.keepalive_time_ms", 1_000),  # notices within 3 s a router that hangs or vanished without a word
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),  # or it takes 60 s, whatever keepalive_timeout_ms says
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
Code = grpc.StatusCode
MAX_FAILURES = 600  # without an event between them; with the pauses after them about five minutes


class Routers:
    """One channel and stub per router."""

    def __init__(self, endpoints: list[str]) -> None:
        self.endpoints = endpoints
        self.channels = [grpc.insecure_channel(endpoint, options=OPTIONS) for endpoint in endpoints]
        self.stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self.channels]

    def close(self) -> None:
        for channel in self.channels:
            channel.close()

    @property
    def first(self) -> inference_pb2_grpc.InferenceStub:
        return self.stubs[0]


def new_request(text: str, max_tokens: int) -> inference_pb2.GenerateRequest:
    """It has an id of its own, so that it can be sent twice and runs once."""
    request = inference_pb2.GenerateRequest(request_id=str(uuid.uuid4()), text=text)
    request.sampling.temperature = 0
    request.sampling.max_tokens = max_tokens
    request.sampling.ignore_eos = True
    return request


@dataclass
class Explanation:
    """What octavo says of a failed call: the details of google.rpc.Status, if there are any."""

    code: grpc.StatusCode
    reason: str = ""  # empty: no router said this; the connection broke, or a proxy answered
    fields: list[str] = field(default_factory=list)
    retry_s: float = 0.0


def explain(error: Any) -> Explanation:
    told = Explanation(error.code())
    status = rpc_status.from_call(error)  # decodes grpc-status-details-bin
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details if status else ():
        if detail.Unpack(info):
            told.reason = info.reason
        elif detail.Unpack(bad):
            told.fields = [violation.field for violation in bad.field_violations]
        elif detail.Unpack(retry):
            told.retry_s = retry.retry_delay.ToTimedelta().total_seconds()
    return told


def elsewhere(told: Explanation) -> bool:
    """Whether another router may go on with the stream: this one is gone, is going, or has no room for it."""
    if told.reason:
        return told.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)
    return told.code in (Code.UNAVAILABLE, Code.INTERNAL, Code.UNKNOWN, Code.CANCELLED)


@dataclass
class Journey:
    """How a stream went: how often it was attached again, and which status ended the connection before."""

    attached: int = 0
    status: grpc.StatusCode = Code.OK


def follow(
    routers: Routers,
    request: inference_pb2.GenerateRequest,
    journey: Journey | None = None,
    deadline_s: float | None = None,
) -> Iterator[inference_pb2.GenerateEvent]:
    """Every event of a request, once and in order, over as many routers as it takes."""
    journey = journey or Journey()
    until = None if deadline_s is None else time.monotonic() + deadline_s
    place = None  # after the last event that was handed out
    next_index = 0
    failures = 0  # since the last event
    for attempt in itertools.count():
        stub = routers.stubs[attempt % len(routers.stubs)]
        timeout = None if until is None else max(until - time.monotonic(), 0.001)
        if place:
            call = stub.Attach(place, timeout=timeout)
        else:
            call = stub.Generate(request, timeout=timeout)
        told = Explanation(Code.OK)  # an end without `finished` is none
        try:
            for event in call:
                yield event
                place = inference_pb2.AttachRequest(resume_token=event.resume_token)
                next_index = event.first_index + len(event.token_ids)
                failures = 0
                if event.HasField("finished"):
                    return
        except grpc.RpcError as error:
            told = explain(error)
            if told.code is Code.DEADLINE_EXCEEDED and place and until is not None:
                until = None  # the call has ended with the request: fetch its last tokens
            elif told.reason == "FOREIGN_TOKEN":  # the store was lost, and the key of tokens with it
                place = inference_pb2.AttachRequest(request_id=request.request_id, next_indexes=[next_index])
            elif not elsewhere(told) or failures > MAX_FAILURES:
                raise
        finally:
            call.cancel()
        journey.status = told.code
        time.sleep(told.retry_s + random.uniform(0, min(1.0, 0.05 * 2**failures)))
        failures += 1
        journey.attached += place is not None


@dataclass
class Answer:
    """It grows. Each token has an index: a lost one or a double one cannot go unnoticed."""

    tokens: int = 0
    text: str = ""
    finish: str = ""

    def add(self, event: inference_pb2.GenerateEvent) -> None:
        if event.first_index != self.tokens:
            raise ValueError(f"token {event.first_index} came, {self.tokens} is due")
        self.tokens += len(event.token_ids)
        self.text += event.text
        if event.finish_reason:
            self.finish = finish_name(event.finish_reason)
        if event.finished.HasField("failure"):
            raise RuntimeError(event.finished.failure.message)

    def __str__(self) -> str:
        return f"tokens={self.tokens} finish={self.finish}"


def finish_name(reason: int) -> str:
    return types_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")


# The parts


def health(routers: Routers) -> str:
    request = health_pb2.HealthCheckRequest(service="octavo.v1.Inference")
    reply = health_pb2_grpc.HealthStub(routers.channels[0]).Check(request)
    return f"status={health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"


def stream(routers: Routers) -> str:
    answer = Answer()
    for event in follow(routers, new_request("Once upon a time", 24)):
        answer.add(event)
        print(event.text, end="", flush=True)
    print()
    return str(answer)


def complete(routers: Routers) -> str:
    reply = routers.first.Complete(new_request("Il était une fois", 24))
    output = reply.outputs[0]
    print(output.text)
    counts = f"prompt_tokens={reply.usage.prompt_tokens} tokens={len(output.token_ids)}"
    return f"{counts} finish={finish_name(output.finish_reason)}"


def cancel(routers: Routers) -> str:
    answer = Answer()
    request = new_request("Count for ever: 1, 2, 3,", 1000)
    for event in follow(routers, request):
        if not answer.tokens:
            routers.first.Cancel(inference_pb2.CancelRequest(request_id=request.request_id))
        answer.add(event)
    return str(answer)


def deadline(routers: Routers) -> str:
    answer = Answer()
    for event in follow(routers, new_request("Count for ever: 1, 2, 3,", 1000), deadline_s=1.0):
        answer.add(event)
    return str(answer)


def errors(routers: Routers) -> str:
    wrong = new_request("Hello", 1)
    wrong.sampling.temperature = -1
    wrong.sampling.top_p = 2
    try:
        routers.first.Complete(wrong)
    except grpc.RpcError as error:
        told = explain(error)
        return f"code={told.code.name} reason={told.reason} fields={','.join(told.fields)}"
    raise RuntimeError("two wrong fields were accepted")


def attach(routers: Routers) -> str:
    answer, journey = Answer(), Journey()
    for event in follow(routers, new_request("The story of a router:", 1000), journey):
        if not answer.tokens:
            print(f"attach reading from={routers.endpoints[0]}", flush=True)  # kill this router now
        answer.add(event)
    print(answer.text)
    return f"attached={journey.attached} status={journey.status.name} {answer}"


PARTS: list[Callable[[Routers], str]] = [health, stream, complete, cancel, deadline, errors, attach]


def main() -> int:
    if len(sys.argv) < 2:
        print("usage: client.py HOST:PORT[,HOST:PORT…] [part …]", file=sys.stderr)
        return 2
    routers, chosen, failed = Routers(sys.argv[1].split(",")), sys.argv[2:], 0
    for part in PARTS:
        if chosen and part.__name__ not in chosen:
            continue
        try:
            print(f"{part.__name__} ok {part(routers)}", flush=True)
        except grpc.RpcError as error:
            told, failed = explain(error), 1
            values = f"code={told.code.name} reason={told.reason} retry_ms={told.retry_s * 1000:.0f}"
            print(f"{part.__name__} failed {values} {error.details()}", flush=True)
        except (RuntimeError, ValueError) as error:
            failed = 1
            print(f"{part.__name__} failed code=UNKNOWN reason= retry_ms=0 {error}", flush=True)
    routers.close()
    return failed


if __name__ == "__main__":
    sys.exit(main())
