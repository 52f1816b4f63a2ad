"""Offline generation with a real (tiny) model in a folder: weights, tokenizer and chat template as people have them."""

import re
from pathlib import Path

import pytest
import torch

from gpu_worker import LLM, SamplingParams
from octavo.cli import up

torch.set_num_threads(1)

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder[0]), device="cpu", kv_cache_bytes="4MiB", swap_bytes="1MiB", threads=1) as llm:
        yield llm


@torch.inference_mode()
def continued(model, ids, count):
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[-count:]


def test_greedy_tokens_are_those_of_transformers(folder, llm):
    prompts = ["The capital of France is", "¿Qué?", "x" * 100]
    answers = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        (output,) = answer.outputs
        assert answer.prompt_token_ids == list(prompt.encode())
        expected = continued(folder[1], answer.prompt_token_ids, 24)
        assert list(output.token_ids) == expected
        assert output.text == bytes(i for i in expected if i < 256).decode(errors="replace")


def test_a_chat_goes_through_the_models_template(folder, llm):
    turns = [{"role": "user", "content": "Hi <|im_start|>"}]
    one, (again, other) = llm.chat(turns, GREEDY, False), llm.chat([turns, [*turns, *turns]], GREEDY, False)
    ids = [256, *b"user\nHi <|im_start|>", 256, *b"assistant\n"]
    assert list(again.prompt_token_ids) == ids
    assert again.prompt == "<|im_start|>user\nHi <|im_start|><|im_start|>assistant\n"
    assert list(one[0].outputs[0].token_ids) == list(again.outputs[0].token_ids) == continued(folder[1], ids, 24)
    assert len(other.prompt_token_ids) > len(ids)


README = Path(__file__).resolve().parents[3] / "README.md"


def test_the_first_example_reads_well(demo_model: Path) -> None:
    found = re.search(r"octavo generate '(.+)' --max-tokens (\d+) --temperature 0\n", README.read_text())
    assert found and (found[1], int(found[2])) == (up.SAMPLE_PROMPT, up.SAMPLE_TOKENS)
    with LLM(str(demo_model), threads=1, max_model_len=64) as llm:
        (output,) = llm.generate(found[1], SamplingParams(max_tokens=int(found[2]), temperature=0))
    assert re.fullmatch(r" [a-z][A-Za-z ,]+\.", output.outputs[0].text)
