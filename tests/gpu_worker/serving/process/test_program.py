"""The start of a worker process: it listens while the model loads."""

import asyncio
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_worker.serving.process import program
from gpu_worker.serving.process.listener import Listener
from gpu_worker.serving.process.program import build_runners_in_thread
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.request import errors
from octavo.request.errors import NotFound
from octavo.settings.worker import WorkerSettings
from octavo.wire import statuses
from octavo.wire.channel import open_channel


async def test_it_listens_and_says_so_while_the_model_loads(monkeypatch):
    release = threading.Event()

    def slow(settings: WorkerSettings) -> FakeRunner:
        release.wait(20)
        return FakeRunner()

    monkeypatch.setattr(program, "build_runner", slow)
    settings = WorkerSettings(listen="127.0.0.1:0", web_listen="", runner="fake")
    listener = Listener(settings)
    await listener.open()
    loading = asyncio.create_task(build_runners_in_thread(settings))
    async with open_channel(listener.endpoint, internal=True) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await worker_pb2_grpc.WorkerStub(channel).Hello(worker_pb2.HelloRequest())
        assert isinstance(statuses.error_from(raised.value), errors.Loading)
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    release.set()
    runner, draft_model = await loading
    assert (runner.info.model, draft_model) == ("fake", None)
    await listener.close()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (NotFound("model: nothing is there"), "model: nothing is there"),
        (PermissionError(13, "Permission denied", "config.json"), "config.json: Permission denied: make it readable"),
        (MemoryError(), "not enough memory (MemoryError): lower --kv-cache-bytes"),
        (RuntimeError("Unable to allocate\nmemory"), "not enough memory (Unable to allocate memory)"),
        (KeyError("hidden_size"), "KeyError: 'hidden_size'"),
    ],
)
async def test_the_last_line_says_why_it_cannot_start(monkeypatch, caplog, error, says):
    def build(_settings):
        raise error

    monkeypatch.setattr(program, "build_runner", build)
    assert await program.serve(WorkerSettings(listen="127.0.0.1:0", web_listen="", store="memory://")) == 1
    last = caplog.records[-1]
    assert last.levelname == "ERROR"
    assert last.getMessage().startswith(f"cannot start: {says}")
    assert "\n" not in last.getMessage()
