"""Streams of models of every kind survive what happens to workers: a move with its blocks, swaps, and kill -9."""

import asyncio
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import transformers
from encoded_types import TinyEncoded
from folder_llama import save_noisy
from folder_qwen_vl import file_of, folder_qwen_vl, picture, shown, text_part
from live.cluster import Shape
from live.fixtures import whole
from live.reader import Reader
from spoken_types import DE, NO_TIMES, START, TRANSCRIBE, TinySpeech, said, wav
from transformers_types import LATENT, ROUTED_EXPERTS, STATEFUL

from octavo.client import SamplingParams, Speech

pytestmark = pytest.mark.timeout(600)  # workers import torch and transformers, and others may need the cores
QUICK = ("latent", "qwen-vl")  # so a stream has to be long, or it ends before all has happened to it
WAIT_S = 120.0
END = 258  # the token after a text, where a model has an encoder


class Encoded:
    """A model with an encoder. One of its prompts is a text."""

    prompts = ("the house is wonderful", *([number + 3, *range(40, 90)] for number in range(2)))

    def __init__(self, name, folder):
        self.tiny = TinyEncoded(name, folder, **({"max_position_embeddings": 1024} if name == "bart" else {}))
        self.folder = self.tiny.directory

    def likeliest(self, prompt, output):
        encoded = [*map(ord, prompt), END] if isinstance(prompt, str) else prompt
        decoded = [*self.tiny.start, *output]
        return self.tiny.logits(encoded, decoded)[len(self.tiny.start) - 1 : -1].argmax(-1).tolist()


class DecoderOnly:
    """Recurrent layers, some with experts, or latent attention with experts."""

    prompts = tuple([number, *range(30, 90)] for number in range(3))
    kinds: ClassVar = {
        "latent": ("DeepseekV3", {**LATENT, **ROUTED_EXPERTS}),
        **{name: STATEFUL[name] for name in ("granitemoehybrid", "jamba", "lfm2", "qwen3_5_text")},
    }

    def __init__(self, name, folder):
        torch.manual_seed(1)
        kind, sizes = self.kinds[name]
        config = getattr(transformers, f"{kind}Config")(**{**sizes, "vocab_size": 257, "max_position_embeddings": 2048})
        save_noisy(transformers.AutoModelForCausalLM.from_config(config), folder)
        self.folder = folder

    def likeliest(self, prompt, output):
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder).eval()
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.argmax(-1).tolist()


class Sighted:
    """A model that takes pictures. It must say what it says undisturbed."""

    parts = (shown(file_of(picture(150, 90))), text_part(" and "), shown(file_of(picture(60, 130, seed=3))))
    prompts = ([{"role": "user", "content": list(parts)}],)
    likeliest = None

    def __init__(self, name, folder):
        self.folder = folder_qwen_vl(folder)


class Hearing:
    """A model that writes down what it hears."""

    samples = (said(0.9), said(1.0, 1))
    prompts = tuple(Speech(wav(each), "de") for each in samples)

    def __init__(self, name, folder):
        self.tiny = TinySpeech(folder, max_target_positions=512)
        self.folder = folder

    def likeliest(self, prompt, output):
        decoded = [START, DE, TRANSCRIBE, NO_TIMES, *output]
        logits = self.tiny.logits(self.samples[self.prompts.index(prompt)], decoded)[3:-1].clone()
        told = self.tiny.model.generation_config
        logits[:, told.suppress_tokens] = logits[0, told.begin_suppress_tokens] = -torch.inf
        return logits.argmax(-1).tolist()


KINDS = {
    "bart": Encoded,
    "t5-gated": Encoded,
    "qwen-vl": Sighted,
    "whisper": Hearing,
    **dict.fromkeys(DecoderOnly.kinds, DecoderOnly),
}


@pytest.fixture(
    params=[
        "qwen-vl",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != "qwen-vl"),
    ]
)
def kind(request, tmp_path):
    made = KINDS[request.param](request.param, tmp_path / "model")
    made.num_tokens = 1500 if request.param in QUICK else 400
    return made


@pytest.fixture
def pair(clusters, kind):
    model = ("--model", str(kind.folder), "--threads", "1", "--kv-cache-bytes", "64MiB", "--swap-bytes", "16MiB")
    model += ("--speculation", "off")  # else a stream ends before all has happened to it
    yield from whole(clusters(Shape(routers=1, workers=2, runner="model", start_s=300.0, worker_args=model)))


def pictures_in(store):
    """Of how many sequences the store has pictures."""
    return store.ask("KEYS", "*:pictures").count(b":pictures")


async def check_hit(client, params, prompt, output):
    """What goes on from the blocks of a request before says what a stream has said."""
    again = [await client.complete(prompt, replace(params, max_tokens=len(output))) for _ in range(2)]
    assert [each.outputs[0].token_ids for each in again] == [tuple(output)] * 2
    assert again[1].usage.cached_tokens > len(prompt) // 2


async def test_streams_survive_what_happens_to_workers(pair, kind):
    aside, params = asyncio.to_thread, SamplingParams(temperature=0.0, max_tokens=kind.num_tokens, ignore_eos=True)
    async with pair.client() as client:
        undisturbed = [Reader(client.generate(prompt, params)) for prompt in kind.prompts[: not kind.likeliest]]
        await asyncio.gather(*(reader.task for reader in undisturbed))
        readers = [Reader(client.generate(p, params, request_id=f"s{n}")) for n, p in enumerate(kind.prompts)]
        await asyncio.gather(*(reader.until(12, WAIT_S) for reader in readers))
        assert pictures_in(pair.store) == (len(kind.prompts) if isinstance(kind, (Sighted, Hearing)) else 0)
        first = await aside(pair.owner, "s0")
        assert (await aside(pair.migrate, "s0", "w1" if first == "w0" else "w0")).num_blocks > 0
        for operation, num_tokens in (("OUT", 0), ("IN", 40), ("DROP", 55)):
            assert await aside(pair.swap, "s0", operation) > 0
            await readers[0].until(num_tokens, WAIT_S)
        pair.kill(await aside(pair.owner, "s0"))
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), WAIT_S)
        if isinstance(kind, DecoderOnly):
            said_before = readers[0].tokens[0]
            await check_hit(client, params, [*kind.prompts[0], *said_before[:100]], said_before[100:200])
    for prompt, reader in zip(kind.prompts, readers, strict=True):
        output = reader.tokens[0]
        assert len(output) == params.max_tokens
        assert output == (kind.likeliest(prompt, output) if kind.likeliest else undisturbed[0].tokens[0])
    assert pictures_in(pair.store) == 0, "a sequence that has ended needs no pictures"
