"""What operators type to name prefixes and adapters, and to see a request, as a router that is there answers it."""

import asyncio
import json

import pytest
from loras import write_small_lora

from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.cli import main
from octavo.client import SamplingParams
from octavo.request.sampling import Constraint

TEXT = "The law of the sea, in as many words as fill some blocks. " * 3


@pytest.fixture
async def octavo(world, capsys, monkeypatch, tmp_path):
    """Runs a command against a router with a worker that keeps prefixes and adapters: its status and what it says."""
    await world.start([WitnessRunner(step_s=0.001)])
    monkeypatch.chdir(tmp_path)

    async def run(*words, flag="--admin-endpoint"):
        address = world.routers[0].endpoint if flag == "--endpoint" else world.admin_endpoint()
        code = await asyncio.to_thread(main, [*words, flag, address])
        told = capsys.readouterr()
        return code, told.out if code == 0 else told.err

    return run


async def test_prefixes_are_named_listed_and_forgotten(octavo, tmp_path):
    for name, text in (("law", TEXT), ("empty", ""), ("short", "brief")):
        (tmp_path / name).write_text(text)
    assert await octavo("prefix", "list") == (0, "no prefix has a name: octavo prefix add NAME FILE\n")
    said = f"sea: {len(TEXT)} tokens, to stay warm on 2 workers of witness\n"
    assert await octavo("prefix", "add", "sea", "law", "--text", "--workers", "2") == (0, said)
    _, added = await octavo("prefix", "add", "air", "law", "--text", "--json")
    known = {"name": "air", "model": "witness", "tenant": "", "num_tokens": len(TEXT), "workers": 0}
    known |= {"num_requests": 0, "kind": "text", "full_on": []}
    assert json.loads(added).items() >= known.items()
    _, listed = await octavo("prefix", "list")
    assert [line.split()[:6] for line in listed.splitlines()[1:]] == [
        [name, "witness", "-", "text", str(len(TEXT)), workers] for name, workers in (("air", "all"), ("sea", "2"))
    ]
    for words, code, says in (
        (("add", "sea", "empty", "--text"), 2, "text: is empty; give some text"),
        (("add", "sea", "short", "--text"), 2, "5 tokens in common, too few to fill a block of 16; give a longer text"),
        (("add", "sea", "law", "--workers", "0"), 2, "a number from 1 to 10000"),
        (("add", "sea", "law"), 2, "chat: this model has no chat template"),
        (("remove", "none"), 1, "no prefix 'none' of this model and tenant; there is air, sea"),
    ):
        found, told = await octavo("prefix", *words)
        assert (found, says in told) == (code, True), told
    assert await octavo("prefix", "remove", "sea") == (0, "sea is forgotten\n")
    assert await octavo("prefix", "remove", "air", "--json") == (0, '{"name": "air"}\n')
    assert await octavo("prefix", "list", "--json") == (0, "[]\n")


async def test_adapters_are_named_listed_and_forgotten(octavo, world, tmp_path):
    folder = write_small_lora(tmp_path / "a0", 0)
    assert await octavo("adapter", "list") == (0, "no adapter has a name: octavo adapter add NAME PATH\n")
    _, added = await octavo("adapter", "add", "poems", "a0", "--json")
    digest = json.loads(added)["digest"]
    _, told = await octavo("adapter", "add", "songs", str(folder))
    assert told.startswith("songs: an adapter of witness, rank ")
    assert told.endswith(f"digest {digest}\n")
    params = SamplingParams(max_tokens=3, temperature=0)
    await world.client().complete([1, 2], params, model="songs", request_id="asked")
    _, listed = await octavo("adapter", "list")
    for line, name in zip(listed.splitlines()[1:], ("poems", "songs"), strict=True):
        assert (line.split()[:2], line.split()[-1]) == ([name, "witness"], str(folder))
    code, shown = await octavo("show", "asked", flag="--endpoint")
    assert (code, f"model witness with poems or songs, digest {digest}" in shown) == (0, True)
    _, shown = await octavo("show", "asked", "--json", flag="--endpoint")
    assert [entry["what"] for entry in json.loads(shown)["timeline"]][-1] == "ended"
    assert (await octavo("show", "never", flag="--endpoint"))[0] == 1
    assert await octavo("adapter", "remove", "poems") == (0, "poems is forgotten\n")
    assert await octavo("adapter", "remove", "songs", "--json") == (0, '{"name": "songs"}\n')
    assert await octavo("adapter", "list", "--json") == (0, "[]\n")


async def test_guesses_are_counted_in_show_in_the_view_and_in_metrics(octavo, world):
    """All figures are those of the same guesses: what a grammar forces, which is always right."""
    text = "a long text that nothing else may be"
    params = SamplingParams(max_tokens=60, temperature=0, constraint=Constraint.choice([text]))
    answer = await world.client().complete([1, 2], params, request_id="guessed")
    worker = world.workers[0]
    values = {(each.name, each.labels): each.value for each in worker.metrics.values()}
    right = values["octavo_drafts_accepted_total", ("forced",)]
    num_tokens = answer.usage.output_tokens
    assert right == values["octavo_drafts_total", ("forced",)] > num_tokens / 2
    assert values["octavo_decodes_total", ()] + right == num_tokens - 1  # the first one is the prompt's
    assert not any(count for (name, labels), count in values.items() if "drafts" in name and labels != ("forced",))

    _, shown = await octavo("show", "guessed", flag="--endpoint")
    assert f"{right} of {right} guessed tokens were right" in shown
    _, seen = await octavo("top", "--json")
    load = json.loads(seen)["workers"][0]["load"]
    drafts = {each["drafter"]: (each["num_drafts"], each["num_accepted_drafts"]) for each in load["drafts"]}
    assert (drafts, load["num_decodes"]) == ({"forced": (right, right)}, num_tokens - 1 - right)
