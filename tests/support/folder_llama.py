"""A tiny Llama of random weights in a folder, with a tokenizer of bytes: for programs that load it themselves."""

from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from octavo.text.detokenizer import byte_alphabet


def folder_llama(folder: Path, **sizes: object) -> Path:
    """Its shares are uneven: three KV heads, and sizes that few numbers of ranks divide."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 257,
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "max_position_embeddings": 2048,
            "bos_token_id": None,
            "eos_token_id": 256,
            **sizes,
        }
    )
    save_noisy(transformers.LlamaForCausalLM(config), folder)
    return folder


def save_noisy(model: transformers.PreTrainedModel, folder: Path) -> None:
    """The model with matrices of noise, and a tokenizer whose tokens are bytes."""
    for parameter in model.eval().parameters():
        if parameter.dim() > 1 and parameter.requires_grad:  # sinusoids of positions are in no file
            parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    save_bytes_tokenizer(folder)


def save_bytes_tokenizer(folder: Path) -> None:
    bytes_tokenizer("<|im_start|>").save(str(folder / "tokenizer.json"))


def bytes_tokenizer(*special: str) -> tokenizers.Tokenizer:
    """A tokenizer whose tokens are bytes, and these."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer
