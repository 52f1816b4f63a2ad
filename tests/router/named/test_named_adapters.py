"""Adapters with names, through routers and workers of one process whose tokens depend on the digest."""

import asyncio
import json
import logging
from dataclasses import replace

import pytest
from live.oracle import Oracle
from loras import write_small_lora
from web_pages import metrics

from gpu_worker.testing.fake_runner import FakeRunner
from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.client import SamplingParams
from octavo.model_files.lora_files import read_lora
from octavo.model_files.lora_support import LoraSupport
from octavo.process import telemetry
from octavo.request.errors import BadModel, InvalidArgument, NotFound, TooLarge, TooManyAdapters, Unimplemented
from octavo.store.memory import MemoryStore
from octavo.v1 import admin_pb2, inference_pb2, types_pb2
from octavo.wire.public import sampling_to_wire
from router.named import named_adapters
from router.named.named_adapters import NamedAdapter
from router.named.named_entries import NamedEntries

PROMPT = list(range(40))
PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture
def folders(tmp_path):
    """Those of three adapters."""
    return [write_small_lora(tmp_path / f"a{number}", number) for number in range(3)]


async def start(world, workers=2, routers=2, **settings):
    await world.start([WitnessRunner(step_s=0.001) for _ in range(workers)], routers, router=settings)


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
    prompt = types_pb2.TokenIds(ids=PROMPT)
    request = inference_pb2.GenerateRequest(lora="a1", token_ids=prompt, sampling=sampling_to_wire(PARAMS))
    found = await world.stub(1).Complete(request)
    assert list(found.outputs[0].token_ids) == expected(folders[1])
    request.model = "witness"
    assert (await world.stub().Complete(request)).outputs[0].token_ids == found.outputs[0].token_ids
    digests = {entry.record.lora for entry in world.entries}
    assert digests == {"", *(read_lora(folder).digest for folder in folders)}
    await adapters.remove("a0")
    with pytest.raises(NotFound, match="no model 'a0' here"):
        await ask(world.client(0), "a0")
    with pytest.raises(NotFound, match="name: no adapter 'a0' here"):
        await adapters.remove("a0")


async def test_what_a_router_refuses(world, folders, tmp_path, monkeypatch):
    await start(world, workers=1, routers=1)
    adapters = world.routers[0].adapters
    for name, source, error, words in (
        ("a/b", folders[0], InvalidArgument, "name: 1 to 64 letters"),
        ("witness", folders[0], InvalidArgument, "witness is the name of a model"),
        ("a", "relative", InvalidArgument, "must be an absolute path"),
        ("a", "/" + "x" * 1024, InvalidArgument, "at most 1024 characters"),
        ("a", tmp_path, NotFound, "no adapter_config"),
        ("a", tmp_path / "a.gguf", NotFound, "no file a.gguf there"),
    ):
        with pytest.raises(error, match=words):
            await adapters.add(name, str(source))
    with pytest.raises(NotFound, match="no model 'other' here"):
        await adapters.add("a", str(folders[0]), "other")
    monkeypatch.setattr(named_adapters.limits, "MAX_ADAPTERS", 1)
    await adapters.add("a", str(folders[0]))
    with pytest.raises(TooManyAdapters):
        await adapters.add("b", str(folders[0]))
    assert [adapter.name for adapter in adapters.all()] == ["a"]
    request = inference_pb2.GenerateRequest(lora="b", text="x")
    with pytest.raises(NotFound, match="lora: no adapter 'b' here"):
        await world.routers[0].inference.preparer.prepare(request)


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


async def test_a_name_is_not_given_to_what_no_worker_of_the_model_runs(world, folders, tmp_path):
    """One that is known to take it suffices, and so does one that says nothing."""
    runners = [WitnessRunner(), WitnessRunner()]
    shapes = LoraSupport(num_layers=1, shapes={"q_proj": (4, 8)})
    runners[0].info = replace(runners[0].info, lora_support=shapes)
    runners[1].info = replace(runners[1].info, lora_support=replace(shapes, shapes={"q_proj": (4, 4)}))
    await world.worker(FakeRunner())  # takes none
    await world.start([runners[0]], adapter_bytes=64)
    adapters, large = world.routers[0].adapters, write_small_lora(tmp_path / "large", 1, 16)
    for folder, model, error, words in (
        (folders[0], "witness", BadModel, r"q_proj\.lora_A\.weight is for 4 inputs, and the model's q_proj has 8"),
        (large, "witness", TooLarge, "128 bytes does not fit 64: .*--adapter-bytes"),
        (folders[0], "fake", Unimplemented, "model: fake takes no adapters: .*Llama's family"),
    ):
        with pytest.raises(error, match=words):
            await adapters.add("a", str(folder), model)
    assert adapters.all() == []
    await world.worker(runners[1])
    await world.ready()
    await adapters.add("a", str(folders[0]), "witness")
    await world.kill(world.workers[1])
    assert await ask(world.client(), "a") == expected(folders[0])


async def test_a_name_whose_model_is_gone_says_so_and_no_worker_of_another_model_has_it(world, folders):
    other = WitnessRunner()
    other.info = replace(other.info, model="other", fingerprint="others")
    await world.start([WitnessRunner(), other])
    await world.routers[0].adapters.add("a", str(folders[0]), "witness")
    await world.routers[0].adapters.add("b", str(folders[0]), "other")
    await ask(world.client(), "b")
    link = next(link for link in world.routers[0].pool.links.values() if link.facts.model == "other")
    await world.until(lambda: link.view().adapters)
    listed = (await world.admin().ListAdapters(admin_pb2.ListAdaptersRequest())).adapters
    assert [(each.name, list(each.loaded_on), each.num_workers) for each in listed] == [
        ("a", [], 1),
        ("b", ["worker-1"], 1),
    ]
    with pytest.raises(NotFound, match="no model 'c' here; there is other, witness, and of adapters a, b"):
        await ask(world.client(), "c")
    gone = NamedAdapter("d", "gone", "0" * 32, "/d", 1, 1)
    await MemoryStore(world.state).put_adapter("d", gone.pack(), 9)
    with pytest.raises(NotFound, match="model: d is an adapter of gone, which is not served here"):
        await ask(world.client(), "d")
    listed = (await world.admin().ListAdapters(admin_pb2.ListAdaptersRequest())).adapters
    assert [each.num_workers for each in listed] == [1, 1, 0]


async def test_a_request_says_with_which_adapter_it_ran(world, folders, caplog):
    caplog.set_level(logging.INFO)
    caplog.handler.setFormatter(telemetry.JsonFormatter("test"))
    await start(world, workers=1, routers=1)
    for number in (0, 1):
        await world.routers[0].adapters.add(f"a{number}", str(folders[number]))
    client, endpoint = world.client(), world.routers[0].http_endpoint
    fingerprints, digests = set(), {}
    for name, folder in (("a0", folders[0]), ("a1", folders[1]), ("witness", None)):
        digest, names = (read_lora(folder).digest, (name,)) if folder else ("", ())
        await ask(client, name, request_id=f"of-{name}")
        digests[f"of-{name}"] = digest
        status = await client.get(f"of-{name}")
        assert (status.model, status.lora, status.lora_names) == ("witness", digest, names)
        kept = (await world.http(endpoint, f"/v1/requests/of-{name}"))[2]
        body = {"model": name, "prompt": [1], "max_tokens": 1}
        answer = (await world.http(endpoint, "/v1/completions", body, method="POST"))[2]
        assert kept["model"] == name and digest in kept["system_fingerprint"] == answer["system_fingerprint"]
        fingerprints.add(kept["system_fingerprint"])
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    ended = {line["request"]: line.get("lora", "") for line in lines if line.get("end") == "length"}
    assert ended.items() >= digests.items()
    assert len(fingerprints) == 3


async def test_an_older_answer_of_the_store_never_comes_after_a_newer_one():
    """However long each takes: two that are under way at once may end in the other order."""
    content, began, is_first = {"a": b"1"}, asyncio.Event(), [True]

    async def slow():
        found, pause_s = dict(content), 0.05 if is_first.pop() else 0
        is_first.append(False)
        began.set()
        await asyncio.sleep(pause_s)
        return found

    entries = NamedEntries(slow, bytes.decode, "thing")
    first = asyncio.create_task(entries.refresh())
    await began.wait()
    content["a"] = b"2"
    await asyncio.gather(first, entries.refresh())
    assert entries.known == {"a": "2"}
    assert not await entries.refresh()


async def test_gateways_are_told_which_adapters_run(world, folders):
    await start(world, workers=1, routers=1, metric_aliases="vllm")
    for number in (0, 1):
        await world.routers[0].adapters.add(f"a{number}", str(folders[number]))
    long = replace(PARAMS, max_tokens=2000)
    tasks = [asyncio.create_task(world.client().complete(PROMPT, long, model=name)) for name in ("a1", "a0", "a1")]
    states = world.routers[0].metrics.progress.stream_states
    await world.until(lambda: states()["witness", False] == 3)
    found = await metrics(world.routers[0].web_endpoint)
    assert found["vllm:lora_requests_info{max_lora=1024,running_lora_adapters=a0,a1,waiting_lora_adapters=}"] > 0
    await world.abandon(tasks)
