"""Streams of a model with recurrent layers on real workers: moved and killed, they say what Transformers says."""

import asyncio

import pytest
import torch
import transformers
from folder_llama import save_noisy
from live.cluster import Shape
from live.fixtures import whole
from live.moves import migrate
from live.reader import Reader
from transformers_types import DELTA, THREE_LINEAR, WIDE

from octavo.client import SamplingParams

PROMPTS = [[number, *range(30, 90)] for number in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True)
SIZES = {**WIDE, **DELTA, **THREE_LINEAR, "vocab_size": 257, "max_position_embeddings": 2048}
pytestmark = pytest.mark.timeout(400)  # workers import torch and transformers, and others may need the cores


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Three layers of gated delta nets for one of attention."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("hybrid")
    save_noisy(transformers.AutoModelForCausalLM.from_config(transformers.Qwen3_5TextConfig(**SIZES)), folder)
    return folder


@pytest.fixture
def pair(clusters, hybrid):
    model = ("--model", str(hybrid), "--threads", "1", "--kv-cache-bytes", "64MiB", "--swap-bytes", "16MiB")
    yield from whole(clusters(Shape(routers=1, workers=2, runner="model", start_s=240.0, worker_args=model)))


def likeliest(folder, prompt, output):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist()


@pytest.mark.long
async def test_a_hybrids_streams_survive_moves_and_kills(pair, hybrid):
    async with pair.client() as client:
        readers = [Reader(client.generate(p, GREEDY, request_id=f"s{n}")) for n, p in enumerate(PROMPTS)]
        await asyncio.gather(*(reader.until(20, 120) for reader in readers))
        moved = [await asyncio.to_thread(migrate, pair, f"s{number}", "w0") for number in range(2)]
        moved += [await asyncio.to_thread(migrate, pair, f"s{number}", "w1") for number in range(2)]
        assert sum(each is not None and each.num_blocks > 0 for each in moved) >= 2
        await asyncio.gather(*(reader.until(60, 120) for reader in readers))
        pair.kill("w1")
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), 240)
        for prompt, reader in zip(PROMPTS, readers, strict=True):
            output = reader.tokens[0]
            assert len(output) == GREEDY.max_tokens
            assert output == likeliest(hybrid, prompt, output)
