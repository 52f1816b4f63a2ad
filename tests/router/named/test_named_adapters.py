"""Adapters with names, through routers and workers of one process whose tokens depend on the digest."""

import asyncio
import shutil
import time

import pytest
from live.oracle import Oracle
from loras import write_small_lora

from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.client import SamplingParams
from octavo.model_files.lora_files import read_lora
from octavo.request.errors import BadModel, InvalidArgument, NotFound, TooManyAdapters
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import sampling_to_wire
from router.named import named_adapters

PROMPT = list(range(40))
PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture
def folders(tmp_path):
    """Those of three adapters."""
    return [write_small_lora(tmp_path / f"a{number}", number) for number in range(3)]


async def start(world, workers=2, routers=2, **settings):
    for _ in range(workers):
        await world.worker(WitnessRunner(step_s=0.001))
    for _ in range(routers):
        await world.router(**settings)
    await world.ready()


async def ask(client, model, prompt=PROMPT, **more):
    return list((await client.complete(prompt, PARAMS, model=model, **more)).outputs[0].token_ids)


def expected(folder=None):
    digest = read_lora(folder).digest if folder else ""
    return Oracle("witness", lora=digest).tokens(PROMPT, 30)


async def test_requests_by_name_run_with_the_adapter(world, folders):
    await start(world)
    adapters, client = world.routers[0].adapters, world.client(1)
    for number, folder in enumerate(folders):
        await adapters.add(f"a{number}", str(folder))
    answers = [await ask(client, model) for model in ("a0", "a1", "a2", "witness", "a0")]
    assert answers == [expected(folder) for folder in (*folders, None, folders[0])]
    request = inference_pb2.GenerateRequest(
        lora="a1", token_ids=types_pb2.TokenIds(ids=PROMPT), sampling=sampling_to_wire(PARAMS)
    )
    found = await world.stub(1).Complete(request)
    assert list(found.outputs[0].token_ids) == expected(folders[1])
    request.model = "witness"
    assert (await world.stub().Complete(request)).outputs[0].token_ids == found.outputs[0].token_ids
    digests = {entry.record.lora for entry in world.entries}
    assert digests == {"", *(read_lora(folder).digest for folder in folders)}


async def test_a_name_gets_other_bytes_and_no_block_of_the_old_ones(world, folders):
    await start(world, workers=1, routers=1)
    adapters, client = world.routers[0].adapters, world.client()
    await adapters.add("a", str(folders[0]))
    assert await ask(client, "a") == expected(folders[0])
    await adapters.add("a", str(folders[1]))
    assert await ask(client, "a") == expected(folders[1])
    await adapters.remove("a")
    with pytest.raises(NotFound, match="no model 'a' here"):
        await ask(client, "a")
    with pytest.raises(NotFound, match="name: no adapter 'a' here"):
        await adapters.remove("a")


async def test_what_a_router_refuses(world, folders, tmp_path, monkeypatch):
    await start(world, workers=1, routers=1)
    adapters = world.routers[0].adapters
    for name, source, error, words in (
        ("a/b", folders[0], InvalidArgument, "name: 1 to 64 letters"),
        ("witness", folders[0], InvalidArgument, "witness is the name of a model"),
        ("a", "relative", InvalidArgument, "must be an absolute path"),
        ("a", "/" + "x" * 1024, InvalidArgument, "at most 1024 characters"),
        ("a", tmp_path, NotFound, "no adapter_config"),
        ("a", tmp_path / "a.gguf", BadModel, "GGUF"),
    ):
        with pytest.raises(error, match=words):
            await adapters.add(name, str(source))
    with pytest.raises(NotFound, match="no model 'other' here"):
        await adapters.add("a", str(folders[0]), "other")
    monkeypatch.setattr(named_adapters, "MAX_ADAPTERS", 1)
    await adapters.add("a", str(folders[0]))
    with pytest.raises(TooManyAdapters):
        await adapters.add("b", str(folders[0]))
    assert [adapter.name for adapter in adapters.all()] == ["a"]
    request = inference_pb2.GenerateRequest(lora="b", text="x")
    with pytest.raises(NotFound, match="lora: no adapter 'b' here"):
        await world.routers[0].inference.preparer.prepare(request)


async def test_one_is_read_at_a_time(world, folders, monkeypatch):
    await start(world, workers=1, routers=1)
    reading, most = [], []

    def read(path):
        reading.append(path)
        most.append(len(reading))
        time.sleep(0.05)
        found = read_lora(path)
        reading.remove(path)
        return found

    monkeypatch.setattr(named_adapters, "read_lora", read)
    adapters = world.routers[0].adapters
    await asyncio.gather(*(adapters.add(f"a{number}", str(folder)) for number, folder in enumerate(folders)))
    assert most == [1, 1, 1]


async def test_a_worker_that_cannot_read_it_says_why(world, folders):
    await start(world, workers=1, routers=1)
    client = world.client()
    await world.routers[0].adapters.add("a", str(folders[0]))
    shutil.copytree(folders[1], folders[0], dirs_exist_ok=True)
    with pytest.raises(BadModel, match=f"has the digest {read_lora(folders[1]).digest} now"):
        await ask(client, "a")
    shutil.rmtree(folders[0])
    with pytest.raises(NotFound, match="no adapter_config"):
        await ask(client, "a")


async def test_an_adapter_goes_where_it_is_in_memory(world, folders):
    await start(world, workers=3, routers=1)
    client = world.client()
    await world.routers[0].adapters.add("a", str(folders[0]))
    await ask(client, "a", [1, 2, 3])
    digest, links = read_lora(folders[0]).digest, world.routers[0].pool.links.values()
    await world.until(lambda: sum(digest in link.view().adapters for link in links) == 1)
    for number in range(6):
        await ask(client, "a", [number, 5, 6])
    assert sum(worker.shelf.num_loaded for worker in world.workers) == 1


async def test_over_http_as_with_vllm(world, folders, tmp_path):
    await start(world, workers=1, routers=1, adapter_folder=str(tmp_path))
    endpoint = world.routers[0].http_endpoint

    async def post(path, **body):
        status, _, answer = await world.http(endpoint, path, body, method="POST")
        return status, answer if status == 200 else answer["error"]["message"]

    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert await post(load, lora_name="a", lora_path="a0") == (200, b"Success: LoRA adapter 'a' added successfully.")
    status, words = await post(load, lora_name="a", lora_path="a1")
    assert (status, words) == (400, "lora_name: a is there: to replace it, send load_inplace: true")
    assert (await post(load, lora_name="a", lora_path=str(folders[1]), load_inplace=True))[0] == 200
    for path in ("", ".", "..", "/etc", "../x", "a0/../.."):
        assert await post(load, lora_name="b", lora_path=path) == (400, f"lora_path: must be a folder below {tmp_path}")
    status, answer = await post(
        "/v1/completions",
        model="a",
        prompt=PROMPT,
        max_tokens=30,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    assert (status, answer["model"]) == (200, "a")
    assert answer["choices"][0]["token_ids"] == expected(folders[1])
    listed = (await world.http(endpoint, "/v1/models"))[2]["data"]
    assert [(model["id"], model.get("parent")) for model in listed] == [("witness", None), ("a", "witness")]
    assert (await world.http(endpoint, "/v1/models/a"))[2]["parent"] == "witness"
    status, words = await post("/v1/embeddings", model="a", input=[1, 2])
    assert status == 404, words
    assert (await post(unload, lora_name="a", lora_int_id=1))[0] == 200
    assert (await post(unload, lora_name="a"))[0] == 404


async def test_what_is_refused_over_http_is_said_of_its_field(world, folders, tmp_path):
    await start(world, workers=1, routers=1, adapter_folder=str(tmp_path))
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
        (load, {"lora_name": None}, 400, "lora_name: 1 to 64 letters"),
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


async def test_nobody_names_adapters_over_http_without_a_folder(world, folders):
    await start(world, workers=1, routers=1)
    body = {"lora_name": "a", "lora_path": str(folders[0])}
    for path in ("load", "unload"):
        found = await world.http(world.routers[0].http_endpoint, f"/v1/{path}_lora_adapter", body, method="POST")
        assert found[0] == 403
        assert "--adapter-folder" in found[2]["error"]["message"]


async def test_a_router_looks_for_a_name_that_was_added_elsewhere_a_moment_ago(world, folders, monkeypatch):
    monkeypatch.setattr(named_adapters, "ROUND_S", 3600)
    await start(world, workers=1)
    paths = {
        "/v1/completions": {"prompt": [1], "max_tokens": 1},
        "/tokenize": {"prompt": "x"},
        "/v1/messages/count_tokens": {"messages": []},
        "/v1/models/{}": None,
    }
    for number, (path, body) in enumerate(paths.items()):
        name = f"a{number}"
        await world.routers[0].adapters.add(name, str(folders[0]))
        call = {"body": {"model": name, **body}, "method": "POST"} if body is not None else {}
        found = await world.http(world.routers[1].http_endpoint, path.format(name), **call)
        assert "no model" not in str(found[2]), found
        assert world.routers[1].adapters.find(name) is not None
