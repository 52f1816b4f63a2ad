"""The start of a worker process: it listens while the model loads."""

import pytest

from gpu_worker.serving.process import program
from octavo.process import machine
from octavo.request.errors import NotFound
from octavo.settings.worker import WorkerSettings


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


async def test_a_gpu_that_is_not_here_is_refused_before_anything_begins(monkeypatch, caplog):
    monkeypatch.setattr(machine, "CUDA_DRIVER", "libnone.so")
    settings = WorkerSettings(listen="127.0.0.1:0", web_listen="", store="memory://", device="cuda")
    assert await program.serve(settings) == 1
    [record] = caplog.records
    says = "cannot start: device: cuda: CUDA's driver finds no GPU here: say --device cpu"
    assert record.getMessage().startswith(says)
