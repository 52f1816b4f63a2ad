"""Tiny models with an encoder, one or more for each `model_type` that is served: in memory for reference, on disk."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from folder_llama import save_noisy
from same_bits import Engine
from tokenizers import processors

from gpu_worker.running.model_runner import ModelRunner
from octavo.request.sampling import SamplingParams

IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
BART = {
    "vocab_size": 264,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 44,  # which fills no whole registers
    "max_position_embeddings": 128,
    **IDS,
}
T5 = {
    "vocab_size": 264,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 44,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# By a name for the test: the class of the configuration (without "Config"), its fields, and generation_config.json.
ENCODED_TYPES: dict[str, tuple[str, dict, dict]] = {
    "bart": ("Bart", {**BART, "tie_word_embeddings": False}, {"forced_bos_token_id": 0}),
    "bart-scaled": ("Bart", {**BART, "scale_embedding": True, "activation_function": "relu"}, {}),
    "mbart": ("MBart", BART, {"forced_bos_token_id": 250}),
    "marian": ("Marian", {**BART, "decoder_start_token_id": 1}, {"bad_words_ids": [[1], [7, 8]]}),
    "pegasus": ("Pegasus", {**BART, "decoder_start_token_id": 1}, {}),
    "plbart": ("PLBart", BART, {}),
    "blenderbot": ("Blenderbot", BART, {}),
    "blenderbot-small": ("BlenderbotSmall", BART, {}),
    "t5": ("T5", T5, {}),
    "t5-gated": ("T5", {**T5, **GATED}, {}),
    "mt5": ("MT5", {**T5, **GATED}, {}),
    "umt5": ("UMT5", {**T5, **GATED}, {}),
}
SPECIAL = ["<s>", "</s>"]  # of the tokenizer: tokens 257 and 258


class TinyEncoded:
    """A random model with an encoder, and a tokenizer of bytes that ends texts with the model's end token."""

    def __init__(self, name: str, directory: Path, **sizes: object) -> None:
        kind, options, generation = ENCODED_TYPES[name]
        torch.manual_seed(len(name))
        self.directory = directory / name
        config = getattr(transformers, f"{kind}Config")(**{**options, **sizes})
        self.model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
        for parameter in self.model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        for key, value in generation.items():
            setattr(self.model.generation_config, key, value)
        save_noisy(self.model, self.directory)
        for module in self.model.modules():  # so that it matters which token is where
            if isinstance(module, torch.nn.Embedding) and module.weight.requires_grad:
                module.weight.data.normal_(std=1.0)
            elif isinstance(module, torch.nn.Linear):
                module.weight.data.mul_(0.5)
        for key in ("final_logits_bias",):
            if hasattr(self.model, key):
                getattr(self.model, key).normal_(std=0.5)
        self.model.tie_weights()
        self.model.save_pretrained(self.directory)
        path = self.directory / "tokenizer.json"
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.add_special_tokens(SPECIAL)
        end = (SPECIAL[1], tokenizer.token_to_id(SPECIAL[1]))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
        tokenizer.save(str(path))
        told = {"eos_token": SPECIAL[1], "tokenizer_class": "PreTrainedTokenizerFast"}
        (self.directory / "tokenizer_config.json").write_text(json.dumps(told))
        first = self.model.generation_config.decoder_start_token_id
        forced = self.model.generation_config.forced_bos_token_id
        self.start = [token for token in (first, forced) if token is not None]

    @torch.inference_mode()
    def logits(self, encoded: list[int], decoded: list[int]) -> torch.Tensor:
        """Those that Transformers computes, for every token of the decoder."""
        return self.model(
            input_ids=torch.tensor([encoded]), decoder_input_ids=torch.tensor([decoded]), use_cache=False
        ).logits[0]

    @torch.inference_mode()
    def generate(self, encoded: list[int], count: int, **given: object) -> list[int]:
        """The output of Transformers' own generate, past the tokens by which the decoder starts."""
        options = {"do_sample": False, "num_beams": 1, "max_new_tokens": count + len(self.start) - 1}
        # Its cache has as many layers as the encoder. Nothing here has the end token forced upon it.
        options |= {"eos_token_id": None, "use_cache": False, "forced_eos_token_id": None, **given}
        found = self.model.generate(input_ids=torch.tensor([encoded]), **options)[0].tolist()
        return found[len(self.start) :][:count]


def engine_of(runner: ModelRunner, **config: Any) -> Engine:
    return Engine(runner=runner, **{"max_batch_tokens": 64, "max_batch_sequences": 16, **config})


def check_branches_and_beams(answers: Callable[..., list[list[int]]], generate: Callable[..., list[int]]) -> None:
    """`answers` are those of an engine to sampling parameters; `generate` is Transformers' own, up to some tokens."""
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    several = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=12, ignore_eos=True)
    drawn = answers(several)
    assert len(set(map(tuple, drawn))) == 3
    for speculation in ("off", "lookup"):
        assert answers(several, speculation=speculation, prefix_caching=False) == drawn
    [best] = answers(SamplingParams(beam_width=3, n=1, max_tokens=6, ignore_eos=True))
    assert best == generate(6, num_beams=3, early_stopping=True, length_penalty=1.0)
    [penalized] = answers(replace(greedy, repetition_penalty=1.7))
    assert penalized == generate(20, repetition_penalty=1.7) != answers(greedy)[0]
