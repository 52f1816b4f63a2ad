"""A router for commands to talk to, and servers of gRPC on an event loop in another thread."""

import asyncio
import threading
from contextlib import contextmanager

import cluster_views

from octavo.cli import connection
from octavo.net.security.authorizer import Authorizer
from octavo.net.server import make_server, open_port
from octavo.request import errors
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

WORDS = ["Paris", ", the", " capital", "."]


class Router(inference_pb2_grpc.InferenceServicer, admin_pb2_grpc.AdminServicer):
    """Says WORDS to everything, in n branches; breaks the first `breaks` connections in the middle."""

    def __init__(self):
        self.requests = []
        self.attached = 0
        self.cancelled = []
        self.drains = []
        self.migrations = []
        self.num_views = 1_000_000  # then a call of WatchCluster ends
        self.breaks = 0
        self.forgets = 0  # so many calls of DrainWorker find that it does not know the worker
        self.hang = threading.Event()
        self.states = []  # what Get answers, one after the other; while there are any, no stream begins
        self.asked = []  # of which requests Get was asked
        self.finish_reason = types_pb2.FINISH_REASON_STOP

    async def Generate(self, request, context):
        self.requests.append(request)
        if request.sampling.temperature > 10:
            raise errors.InvalidArgument("temperature", "at most 10")
        async for event in self.play(request.request_id, 0, request.sampling.n or 1):
            yield event

    async def Attach(self, request, context):
        self.attached += 1
        request_id, index = request.resume_token.decode().split()
        async for event in self.play(request_id, int(index), 1):
            yield event

    async def Get(self, request, context):
        self.asked.append(request.request_id)
        if not self.states:
            raise errors.NotFound("request_id: there is no such request", resource="request")
        return inference_pb2.GetResponse(request_id=request.request_id, state=self.states.pop(0))

    async def Complete(self, request, context):
        outputs = [inference_pb2.Output(branch=0, text="".join(WORDS), finish_reason=self.finish_reason)]
        async for _ in self.play(request.request_id, 0, 1):
            pass
        return inference_pb2.CompleteResponse(request_id=request.request_id, outputs=outputs)

    async def play(self, request_id, start, n):
        while self.states:  # noqa: ASYNC110  Get takes them away
            await asyncio.sleep(0.01)
        for branch in range(n):
            for index in range(start, len(WORDS)):
                if index == 2 and self.breaks:
                    self.breaks -= 1
                    return
                while index == 2 and self.hang.is_set():  # noqa: ASYNC110  by another thread
                    await asyncio.sleep(0.01)
                last = index == len(WORDS) - 1
                event = inference_pb2.GenerateEvent(
                    request_id=request_id,
                    branch=branch,
                    first_index=index,
                    token_ids=[index],
                    text=WORDS[index],
                    resume_token=f"{request_id} {index + 1}".encode(),
                    finish_reason=self.finish_reason if last else 0,
                )
                if self.requests and self.requests[-1].sampling.HasField("logprobs"):
                    scores = event.logprobs.add(chosen=types_pb2.TokenLogprob(token_id=index, logprob=-0.5))
                    scores.top.add(token_id=index, logprob=-0.5)
                    scores.top.add(token_id=index + 1, logprob=-1.25)
                if last and branch == n - 1:
                    event.finished.usage.prompt_tokens = 5
                    event.finished.usage.output_tokens = len(WORDS) * n
                yield event

    async def ListModels(self, request, context):
        reply = inference_pb2.ListModelsResponse()
        reply.models.add(name="words", vocab_size=len(WORDS), context_tokens=4096, num_workers=1)
        return reply

    async def Detokenize(self, request, context):
        return inference_pb2.DetokenizeResponse(text="".join(f"<{token}>" for token in request.token_ids))

    async def Embed(self, request, context):
        self.requests.append(request)
        vectors = [inference_pb2.Embedding(values=[i, 0.5]) for i in range(len(request.inputs))]
        usage = types_pb2.Usage(prompt_tokens=7)
        return inference_pb2.EmbedResponse(model="m", embeddings=vectors, usage=usage)

    async def Score(self, request, context):
        self.requests.append(request)
        return inference_pb2.ScoreResponse(model="m", scores=[0.25] * len(request.right))

    async def Cancel(self, request, context):
        self.cancelled.append(request.request_id)
        return inference_pb2.CancelResponse()

    async def DrainWorker(self, request, context):
        self.drains.append((request.worker_id, request.grace_ms, request.undo))
        self.forgets -= 1
        if request.worker_id != "worker-0" or self.forgets >= 0:
            raise errors.NotFound("worker_id: this router knows no worker 'x'", resource="worker", name="x")
        for left in (2, 1, 0):
            yield admin_pb2.DrainWorkerResponse(
                num_left=left, num_migrated=min(1, 2 - left), num_released=int(left == 0)
            )

    async def WatchCluster(self, request, context):
        if not self.num_views:
            raise errors.Unimplemented("there is no such method")
        for number in range(1, self.num_views + 1):
            yield cluster_views.view(number)
            await asyncio.sleep(request.interval_ms / 1000)

    async def Migrate(self, request, context):
        self.migrations.append((request.request_id, request.worker_id))
        if request.request_id == "waits":
            raise errors.CannotMove("the request waits in the queue: no worker runs it", cause="queued")
        if request.request_id not in ("r", "long"):
            raise errors.NotFound("request_id: there is no such request", resource="request")
        if request.request_id == "long":
            await asyncio.sleep(1.5 * connection.NOTICE_S)
        return admin_pb2.MigrateResponse(
            epoch=3,
            worker_id=request.worker_id or "worker-1",
            num_blocks=9,
            num_sent_blocks=7,
            num_sent_bytes=7 * 4096,
            total_ms=41.5,
            stopped_ms=3.25,
        )

    async def ListWorkers(self, request, context):
        reply = admin_pb2.ListWorkersResponse(router_id="router-0", num_queued=4)
        worker = reply.workers.add(endpoint="127.0.0.1:9", role=admin_pb2.WORKER_ROLE_PREFILL, available=True, pid=77)
        worker.worker_id = "worker-0"
        worker.incarnation = "abc"
        worker.load.num_sequences = 3
        worker.load.num_free_blocks, worker.load.num_used_blocks, worker.load.num_cached_blocks = 10, 20, 30
        worker.ranks.add(rank=0, host="here", pid=77)
        worker.ranks.add(rank=1, host="there", pid=78)
        worker.load.num_standby_sequences, worker.load.num_standby_blocks = 2, 15
        return reply


@contextmanager
def served(*services, tls=None, internal=False):
    """The address of a server in another thread; a service is the function that adds it, and its servicer."""
    address, stop, started = [], [], threading.Event()

    async def main():
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        server = make_server(internal=internal, authorizer=Authorizer(tls=tls is not None))
        for add, servicer in services:
            add(servicer, server)
        address.append(f"127.0.0.1:{open_port(server, '127.0.0.1:0', tls)}")
        await server.start()
        started.set()
        await ended.wait()
        await server.stop(None)
        await server.wait_for_termination()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(20)
    try:
        yield address[0]
    finally:
        stop[0]()
        thread.join(20)


def served_router(router):
    """The address of a router, for clients and for operators."""
    return served(
        (inference_pb2_grpc.add_InferenceServicer_to_server, router),
        (admin_pb2_grpc.add_AdminServicer_to_server, router),
    )
