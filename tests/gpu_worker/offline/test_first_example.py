"""What a reader of README sees first: a sentence, and the same that `octavo up` shows."""

import re
from pathlib import Path

import pytest

from gpu_worker import LLM, SamplingParams
from gpu_worker.models.checkpoint.locate import demo_file
from octavo.cli import up
from octavo.request.errors import NotFound

README = Path(__file__).resolve().parents[3] / "README.md"


def test_the_first_example_reads_well() -> None:
    try:
        model = str(demo_file())
    except NotFound:
        pytest.skip("the demo model is not installed")
    found = re.search(r"octavo generate '(.+)' --max-tokens (\d+) --temperature 0\n", README.read_text())
    assert found and (found[1], int(found[2])) == (up.SAMPLE_PROMPT, up.SAMPLE_TOKENS)
    with LLM(model, threads=1, max_model_len=64) as llm:
        (output,) = llm.generate(found[1], SamplingParams(max_tokens=int(found[2]), temperature=0))
    assert re.fullmatch(r" [a-z][A-Za-z ,]+\.", output.outputs[0].text)
