"""Adapters that clients name over HTTP, in vLLM's shapes."""

import shutil

import pytest
from live.oracle import Oracle
from loras import write_small_lora

from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.model_files.lora_files import WEIGHTS, read_lora

PROMPT = list(range(40))


@pytest.fixture
def folders(tmp_path):
    """Those of three adapters, and a router's folder for adapters in which they are."""
    return [write_small_lora(tmp_path / f"a{number}", number) for number in range(3)]


async def start(world, folder):
    await world.start([WitnessRunner(step_s=0.001)], router={"adapter_folder": folder})


async def test_over_http_as_with_vllm(world, folders, tmp_path):
    await start(world, str(tmp_path))
    endpoint = world.routers[0].http_endpoint

    async def post(path, **body):
        status, _, answer = await world.http(endpoint, path, body, method="POST")
        return status, answer if status == 200 else answer["error"]["message"]

    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert await post(load, lora_name="a", lora_path="a0") == (200, b"Success: LoRA adapter 'a' added successfully.")
    replaced = "lora_name: a is there: to replace it, send load_inplace: true"
    assert await post(load, lora_name="a", lora_path="a1") == (400, replaced)
    assert (await post(load, lora_name="a", lora_path=str(folders[1]), load_inplace=True))[0] == 200
    for path in (".", "..", "/etc", "../x", "a0/../.."):
        assert await post(load, lora_name="b", lora_path=path) == (400, f"lora_path: must be a folder below {tmp_path}")
    asked = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, answer = await post("/v1/completions", model="a", **asked)
    assert (status, answer["model"]) == (200, "a")
    assert answer["choices"][0]["token_ids"] == Oracle("witness", lora=read_lora(folders[1]).digest).tokens(PROMPT, 30)
    listed = (await world.http(endpoint, "/v1/models"))[2]["data"]
    assert [(model["id"], model.get("parent")) for model in listed] == [("witness", None), ("a", "witness")]
    assert (await world.http(endpoint, "/v1/models/a"))[2]["parent"] == "witness"
    assert (await post("/v1/embeddings", model="a", input=[1, 2]))[0] == 404
    assert (await post(unload, lora_name="a", lora_int_id=1))[0] == 200
    assert (await post(unload, lora_name="a"))[0] == 404


async def test_what_is_refused_over_http_is_said_of_its_field(world, folders, tmp_path):
    await start(world, str(tmp_path))
    endpoint = world.routers[0].http_endpoint
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    good = {"lora_name": "a", "lora_path": "a0"}
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    for path, change, status, words in (
        (load, {"lora_path": "a\0b"}, 400, "lora_path: is no path"),
        (load, {"lora_path": "loop/x"}, 400, "lora_path: is no path"),
        (load, {"lora_path": "x" * 300}, 400, "cannot be read as an adapter"),
        (load, {"lora_path": "x/" * 600}, 400, "lora_path: must be an absolute path of at most"),
        (load, {"lora_name": "a/b"}, 400, "lora_name: 1 to 64 letters"),
        (load, {"lora_name": None, "lora_path": 7}, 400, "lora_name: is required: the name that requests use"),
        (load, {"lora_name": None, "lora_path": 7}, 400, "lora_path: must be a string"),
        (load, {"lora_path": ""}, 400, f"lora_path: is required: the adapter's folder, below {tmp_path}"),
        (load, {"lora_name": ["a"]}, 400, "lora_name: must be a string"),
        (load, {"load_inplace": "yes"}, 400, "load_inplace: must be true or false"),
        (unload, {"lora_name": None}, 400, "lora_name: is required"),
        (load, {"base_model_name": "other"}, 400, "base_model_name: no model 'other' here"),
        (unload, {"lora_path": None}, 404, "lora_name: no adapter 'a' here"),
    ):
        found, _, answer = await world.http(endpoint, path, good | change, method="POST")
        assert found == status, answer
        assert words in answer["error"]["message"]
    assert world.routers[0].adapters.all() == []
    for path, body in ((load, good | {"base_model_name": "witness"}), (unload, {"lora_name": "a"})):
        status, headers, _ = await world.http(endpoint, path, body, method="POST", x_request_id="mine")
        assert (status, headers["x-request-id"], headers["content-type"]) == (200, "mine", "text/plain; charset=utf-8")


async def test_what_lies_elsewhere_is_refused_whichever_of_its_parts_is_a_link(world, folders, tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    shutil.copytree(folders[0], outside)
    shutil.copytree(folders[0], inside / "blobs")
    (inside / "folder").symlink_to(outside)
    for name, target in (("file", outside), ("kept", inside / "blobs")):
        shutil.copytree(folders[0], inside / name)
        (inside / name / WEIGHTS).unlink()
        (inside / name / WEIGHTS).symlink_to(target / WEIGHTS)
    (inside / "link").symlink_to(inside / "kept")
    (inside / "x.gguf").symlink_to(outside / WEIGHTS)
    await start(world, str(inside))
    for path, status, words in (
        ("folder", 400, f"must be a folder below {inside}"),
        ("file", 400, f"its {WEIGHTS} is a link to a place that is not below {inside}"),
        ("x.gguf", 400, f"must be a folder below {inside}"),
        ("kept", 200, ""),
        ("link", 200, ""),
    ):
        body = {"lora_name": "a", "lora_path": path, "load_inplace": True}
        found = await world.http(world.routers[0].http_endpoint, "/v1/load_lora_adapter", body, method="POST")
        assert (found[0], words in str(found[2])) == (status, True), found
