"""Anthropic's own package for Python, unchanged, against a router whose workers are killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from example import languages
from folder_qwen_vl import file_of, picture

PROGRAM = Path(__file__).parent / "anthropic_python"
PAGE = Path(__file__).resolve().parents[2] / "docs/pictures.md"


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the package, installed by our own pip: to install another pip first takes as long."""
    folder = tmp_path_factory.mktemp("anthropic") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--no-compile"]
    install = [*pip, "-r", PROGRAM / "requirements.txt"]
    done = subprocess.run(install, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "bin/python"


@pytest.mark.timeout(900)
@pytest.mark.skipif("python" not in languages(), reason="Python is not among the chosen languages")
def test_a_stream_outlives_its_workers(chat_cluster, python):
    base = f"http://{chat_cluster.http_endpoints[0]}"
    command = [python, PROGRAM / "client.py", base]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout.readline() == "begun\n"
        for worker in ("w0", "w1"):
            chat_cluster.kill(worker)
            chat_cluster.spawn(worker)
            chat_cluster.wait_ready()
        found = json.loads(client.stdout.read())
    assert client.returncode == 0
    assert len(found["whole"]) > 1000
    assert found["text"] == found["final"] == found["whole"]
    assert found["reasons"] == ["max_tokens"] * 3
    assert found["usage"] == [1200, 1200]
    assert found["prompt"] == found["counted"]
    assert found["errors"] == [
        ["BadRequestError", 400, "invalid_request_error", True],
        ["NotFoundError", 404, "not_found_error", True],
        ["BadRequestError", 400, "invalid_request_error", True],
    ]


@pytest.mark.timeout(900)
@pytest.mark.skipif("python" not in languages(), reason="Python is not among the chosen languages")
def test_pictures_are_taken(sighted_cluster, python, tmp_path):
    """The example of docs/pictures.md, results of tools, and refusals."""
    cluster, model = sighted_cluster
    (tmp_path / "cat.png").write_bytes(file_of(picture(150, 90)))
    command = [python, PROGRAM / "pictures.py", f"http://{cluster.http_endpoints[0]}", model, PAGE]
    done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["prompt"] == found["counted"] > 15
    assert found["again"] == found["streamed"] == found["text"]
    assert found["result"] > 15
    for (kind, status, said), expected in zip(
        found["errors"], ("data: is not base64", "url: nothing is fetched", "type: must be base64 or url"), strict=True
    ):
        assert (kind, status) == ("BadRequestError", 400)
        assert said.startswith(f"messages[0].content[0].source.{expected}")
