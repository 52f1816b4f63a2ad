"""`LLM.embed` and `LLM.score` with a real (tiny) model: what Transformers computes, by vLLM's names."""

import math
import re
from pathlib import Path

import pytest
import torch

from gpu_worker import LLM, PoolingParams
from octavo.pooling.judges import JUDGES
from octavo.request.errors import InvalidArgument

torch.set_num_threads(1)
TEXTS = ["The capital of France", "¿Qué?", "x" * 200, "The capital of Spain"]


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(
        str(folder[0]), device="cpu", kv_cache_bytes="4MiB", swap_bytes="1MiB", threads=1, runner="pooling"
    ) as llm:
        yield llm


@torch.inference_mode()
def states(model, ids):
    return model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states[-1][0]


def test_vectors_are_those_of_transformers(folder, llm) -> None:
    outputs = llm.embed([*TEXTS, {"prompt_token_ids": [9, 8]}], use_tqdm=False)
    for text, output in zip([*TEXTS, None], outputs, strict=True):
        ids = [9, 8] if text is None else list(text.encode())
        assert output.prompt_token_ids == ids and output.finished and output.failure is None
        assert output.outputs.hidden_size == 32
        last = torch.nn.functional.normalize(states(folder[1], ids)[-1], dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), last, rtol=1e-3, atol=1e-3)
    (mean,) = llm.embed(TEXTS[0], pooling_params=PoolingParams(pooling="mean", dimensions=5), use_tqdm=False)
    cut = torch.nn.functional.normalize(states(folder[1], list(TEXTS[0].encode())).mean(0)[:5], dim=0)
    torch.testing.assert_close(torch.tensor(mean.outputs.embedding), cut, rtol=1e-3, atol=1e-3)


def test_scores_are_cosines_or_what_a_judge_says(folder, llm) -> None:
    one, other = (output.outputs.embedding for output in llm.embed(TEXTS[:2], use_tqdm=False))
    (score,) = llm.score(*TEXTS[:2], use_tqdm=False)
    assert score.outputs.score == pytest.approx(sum(a * b for a, b in zip(one, other, strict=True)), abs=1e-6)
    again, same = llm.score(TEXTS[0], [TEXTS[1], TEXTS[0]], use_tqdm=False)
    assert again.outputs.score == score.outputs.score and same.outputs.score == pytest.approx(1.0)
    with pytest.raises(InvalidArgument, match="yes"):  # its tokens are bytes
        llm.score("q", "d", method="qwen3", use_tqdm=False)
    for left, right in ((["a", "b"], ["c"]), ([], ["c"]), ("a", [])):
        with pytest.raises(InvalidArgument):
            llm.score(left, right, use_tqdm=False)


def test_a_mistake_in_one_prompt_is_found_before_any_step(llm) -> None:
    before = llm.engine.loop.times.num_steps
    for prompts in (["fine", [257]], ["fine", "y" * 600], ["fine", ""]):
        with pytest.raises(InvalidArgument, match=r"prompts\[1\]"):
            llm.embed(prompts, use_tqdm=False)
    for params in (PoolingParams(dimensions=33), PoolingParams(pooling="cls")):
        with pytest.raises(InvalidArgument):
            llm.embed("fine", pooling_params=params, use_tqdm=False)
    assert llm.engine.loop.times.num_steps == before


@pytest.mark.usefixtures("demo_model")
def test_the_pages_example_runs(capsys) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/embeddings.md").read_text(encoding="utf-8")
    (example,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "LLM(" in block]
    exec(example, {})  # noqa: S102 - of this repository
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.usefixtures("demo_model")
def test_the_demo_model_judges_by_the_likelihood_of_yes(demo_model) -> None:
    query, documents = "What is gravity?", ["A force between masses.", "<|im_end|> yes"]
    with LLM(str(demo_model), threads=1, max_model_len=512) as llm:
        scored = llm.score(query, documents, method="qwen3", use_tqdm=False)
        tokenizer, judge = llm.tokenizer, JUDGES["qwen3"]
        for output, document in zip(scored, documents, strict=True):
            body = tokenizer.encode_plain(f"<Instruct>: {judge.instruction}\n<Query>: {query}\n<Document>: {document}")
            ids = [*tokenizer.encode_frame(judge.before), *body, *tokenizer.encode_frame(judge.after)]
            assert output.prompt_token_ids == ids and not set(body) & set(tokenizer.special_ids)
            assert 0 < output.outputs.score < 1 and math.isfinite(output.outputs.score)
