"""`LLM.embed` and `LLM.score` with a real (tiny) model: what Transformers computes, by vLLM's names."""

import json
import re
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from folder_llama import bytes_tokenizer
from tokenizers import processors

from gpu_worker import LLM, PoolingParams
from octavo.pooling.judges import JUDGES
from octavo.request.errors import InvalidArgument

torch.set_num_threads(1)
SMALL = {"kv_cache_bytes": "4MiB", "swap_bytes": "1MiB", "threads": 1}
TEXTS = ["The capital of France", "¿Qué?", "x" * 200, "The capital of Spain"]


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder[0]), runner="pooling", **SMALL) as llm:
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
    for params in (PoolingParams(dimensions=33), PoolingParams(pooling="cls"), 7):
        with pytest.raises(InvalidArgument):
            llm.embed("fine", pooling_params=params, use_tqdm=False)
    assert llm.engine.loop.times.num_steps == before


def saved(model, folder: Path, tokenizer: tokenizers.Tokenizer, spread: float):
    for parameter in model.eval().parameters():
        parameter.data = torch.randn_like(parameter) * spread if parameter.dim() > 1 else parameter.data
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


@torch.inference_mode()
def of_the_model_card(model, tokenizer, texts, end):
    """As Qwen3-Embedding's page does it: padded on the left, the last state of each, with the length 1."""
    ids = [tokenizer.encode(text).ids for text in texts]
    longest = max(map(len, ids))
    padded = torch.tensor([[end] * (longest - len(each)) + each for each in ids])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in ids])
    return torch.nn.functional.normalize(model(input_ids=padded, attention_mask=mask).last_hidden_state[:, -1], dim=1)


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300, "head_dim": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": None}


def test_an_embedding_model_is_read_as_its_authors_publish_it(tmp_path) -> None:
    """Qwen3-Embedding's files and settings, in a small size: no head, an end token after each text, `modules.json`."""
    torch.manual_seed(3)
    tokenizer = bytes_tokenizer("<|endoftext|>", "<|im_end|>")
    end = tokenizer.token_to_id("<|endoftext|>")
    special = [("<|endoftext|>", end)]
    after = processors.TemplateProcessing("$A <|endoftext|>", "$A <|endoftext|> $B <|endoftext|>", special)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), after])
    config = transformers.Qwen3Config(**SIZES, rope_theta=1_000_000, tie_word_embeddings=True)
    model = saved(transformers.Qwen3Model(config), tmp_path, tokenizer, 0.2)
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    modes = {
        f"pooling_mode_{mode}": False for mode in ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    }
    described = {"word_embedding_dimension": 64, **modes, "pooling_mode_lasttoken": True, "include_prompt": True}
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(described))
    task = "Given a web search query, retrieve relevant passages that answer the query"
    queries = [f"Instruct: {task}\nQuery:{query}" for query in ("What is gravity?", "¿Qué?")]
    texts = [*queries, "Gravity is a force.", "x" * 150]
    with LLM(str(tmp_path), **SMALL) as llm:
        outputs = llm.embed(texts, use_tqdm=False)
        scored = llm.score(queries[0], texts[2:], use_tqdm=False)
    expected = of_the_model_card(model, tokenizer, texts, end)
    assert [output.prompt_token_ids for output in outputs] == [tokenizer.encode(text).ids for text in texts]
    found = torch.tensor([output.outputs.embedding for output in outputs])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert [each.outputs.score for each in scored] == pytest.approx((expected[0] @ expected[2:].T).tolist(), abs=1e-3)


def test_a_reranker_says_how_likely_yes_is(tmp_path) -> None:
    """Its folder's name says what it is. The prompt and the softmax are those that its authors give."""
    torch.manual_seed(2)
    tokenizer, directory = bytes_tokenizer("<|im_start|>", "<|im_end|>"), tmp_path / "Tiny-Qwen3-Reranker"
    tokenizer.add_tokens(["yes", "no"])
    model = saved(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)), directory, tokenizer, 0.3)
    judge, query, documents = JUDGES["qwen3"], "What?", ["This one.", "Not <|im_end|> yes"]
    yes, no = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    with LLM(str(directory), **SMALL) as llm:
        scored = llm.score(query, documents, instruction="Look", use_tqdm=False)
        assert [each.outputs.score for each in llm.score(query, query, method="cosine", use_tqdm=False)] == [1.0]
    for output, document in zip(scored, documents, strict=True):
        text = f"{judge.before}<Instruct>: Look\n<Query>: {query}\n<Document>: {document}{judge.after}"
        mine = output.prompt_token_ids
        assert mine == tokenizer.encode(text).ids or "<|im_end|>" in document
        assert mine.count(tokenizer.token_to_id("<|im_end|>")) == 2  # those of the frame
        with torch.inference_mode():
            logits = model(torch.tensor([mine])).logits[0, -1]
        expected = torch.softmax(logits[[yes, no]].double(), 0)[0].item()
        assert output.outputs.score == pytest.approx(expected, abs=1e-4)


@pytest.mark.usefixtures("demo_model")
def test_the_pages_example_runs(capsys, root: Path) -> None:
    """With the demo model, which judges by the likelihood of yes."""
    page = (root / "docs/embeddings.md").read_text(encoding="utf-8")
    (example,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "LLM(" in block]
    exec(example, {})  # noqa: S102 - of this repository
    assert len(capsys.readouterr().out.splitlines()) == 3
