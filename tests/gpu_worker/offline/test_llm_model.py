"""Offline generation with a real (tiny) model in a folder: weights, tokenizer and chat template as people have them."""

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from gpu_worker import LLM, FinishReason, SamplingParams
from octavo.text.detokenizer import byte_alphabet

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder, model


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
        assert answer.prompt_token_ids == tuple(prompt.encode())
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


def test_alone_and_in_company_a_seed_gives_the_same(llm):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=10, n=2)
    (alone,) = llm.generate("draw", params, use_tqdm=False)
    *_, among = llm.generate(["a", "bb", "draw"], [GREEDY, GREEDY, params], use_tqdm=False)
    assert alone.outputs == among.outputs
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids


@pytest.mark.slow
def test_the_demo_model_knows_a_capital():
    with LLM("smollm2", device="cpu", kv_cache_bytes="64MiB", threads=1) as llm:
        (answer,) = llm.generate(
            "The capital of France is", SamplingParams(temperature=0.0, stop=(".",)), use_tqdm=False
        )
    assert answer.outputs[0].text == " Paris"
    assert answer.outputs[0].finish_reason == FinishReason.STOP
