"""OpenAI's API over HTTP with curl, on real processes that are killed."""

import json
import subprocess
import time
from pathlib import Path

PROMPT = {"prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True}


def curl(*words: str) -> list[str]:
    return ["curl", "--silent", "--no-buffer", "--max-time", "100", *words]


def call(endpoint: str, path: str, body: object = None) -> object:
    words = [] if body is None else ["--json", json.dumps(body)]
    done = subprocess.run(curl(*words, f"http://{endpoint}{path}"), capture_output=True, check=True)
    return json.loads(done.stdout)


def chunks(text: str) -> list[dict]:
    """The whole chunks of a stream, which may break off in the middle of one."""
    found = []
    for event in text.split("\n\n")[:-1]:
        if event.startswith("data: {"):
            found.append(json.loads(event.removeprefix("data: ")))
    return found


def text_of(*streams: str) -> str:
    return "".join(choice["text"] for stream in streams for chunk in chunks(stream) for choice in chunk["choices"])


def wait_for(file: Path, num_chunks: int) -> str:
    deadline = time.monotonic() + 60
    while len(chunks(file.read_text())) < num_chunks:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return chunks(file.read_text())[0]["id"]


def test_a_stream_outlives_its_worker_and_goes_on_after_its_router(cluster, tmp_path):
    first, second = cluster.http_endpoints[:2]
    whole = call(second, "/v1/completions", {**PROMPT, "max_tokens": 900})
    body, streamed = json.dumps({**PROMPT, "max_tokens": 900, "stream": True}), tmp_path / "stream"
    with (
        streamed.open("wb") as out,
        subprocess.Popen(curl("--json", body, f"http://{first}/v1/completions"), stdout=out) as client,
    ):
        try:
            request_id = wait_for(streamed, 5)
            owner = call(second, f"/v1/requests/{request_id}?wait=false")["owner"]
            names = {status.incarnation: name for name, status in cluster.workers(1).items()}
            cluster.kill(names[owner])
            wait_for(streamed, len(chunks(streamed.read_text())) + 5)
            assert call(second, f"/v1/requests/{request_id}?wait=false")["epoch"] == 2
            cluster.kill("r0")
            client.wait(60)
        finally:
            client.kill()
    assert client.returncode in (18, 56)  # curl's words for a transfer that broke off
    begun = streamed.read_text()
    assert "[DONE]" not in begun
    after = chunks(begun)[-1]["resume_token"]
    rest = subprocess.run(
        curl(f"http://{second}/v1/requests/{request_id}?stream=true&after={after}"),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert rest.endswith("data: [DONE]\n\n")
    assert text_of(begun, rest) == whole["choices"][0]["text"]
