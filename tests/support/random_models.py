"""Random small models of families that groups divide in other ways than Llama's: their sizes come from a seed."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 257
ENDS = {"eos_token_id": 256, "bos_token_id": None, "pad_token_id": None}
MIXTURES = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "Glm4Moe", "GptOss", "MiniMaxM2")
DENSE = ("Gemma2", "Gemma3Text", "Olmo3", "Granite")
GPTS = ("GPT2", "GPTJ", "GPTNeo", "Bloom", "Falcon", "Mpt")


def random_mixture(draw: random.Random, kind: str) -> transformers.PretrainedConfig:
    kv_heads, experts, inner = draw.randint(1, 4), draw.randint(3, 9), 32 * draw.randint(2, 5)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64 * draw.randint(1, 3),
        "intermediate_size": inner if kind in ("Mixtral", "Olmoe", "GptOss", "MiniMaxM2") else 32 * draw.randint(2, 4),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": 32 * draw.randint(2, 5),
        "num_hidden_layers": draw.randint(2, 3),
        "num_attention_heads": kv_heads * draw.randint(1, 2),
        "num_key_value_heads": kv_heads,
        "head_dim": 16 * draw.randint(1, 2),
        "max_position_embeddings": 2048,
        "num_experts_per_tok": draw.randint(1, 3),
        "n_shared_experts": draw.randint(1, 2),
        "n_group": 1,
        "topk_group": 1,
        "swiglu_limit": 1.5,
        "rotary_dim": 8,
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), experts),
        **ENDS,
    }
    if kind in ("Olmoe", "Qwen2Moe"):  # whose heads have what the hidden size leaves them
        del sizes["head_dim"]
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": draw.choice((1, 2, 4))}
    if kind == "Glm4Moe":
        sizes["first_k_dense_replace"] = draw.randint(0, 1)
    config: Any = getattr(transformers, f"{kind}Config")
    return config(**sizes)


def random_dense(draw: random.Random, kind: str) -> transformers.PretrainedConfig:
    """Layers whose outputs are normed or scaled before they are added, of which some have windows."""
    kv_heads, layers = draw.randint(1, 4), draw.randint(2, 3)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64 * draw.randint(1, 3),
        "intermediate_size": 32 * draw.randint(2, 4),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * draw.randint(1, 2),
        "num_key_value_heads": kv_heads,
        "head_dim": 16 * draw.randint(1, 2),
        "max_position_embeddings": 2048,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"][:layers],
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        **ENDS,
    }
    if kind != "Granite":  # whose heads have what the hidden size leaves them
        del sizes["residual_multiplier"], sizes["logits_scaling"]
    if kind in ("Granite", "Olmo3"):
        del sizes["head_dim"], sizes["query_pre_attn_scalar"], sizes["final_logit_softcapping"]
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": draw.choice((1, 2, 4))}
    if kind == "Granite":
        del sizes["sliding_window"], sizes["layer_types"]
    return getattr(transformers, f"{kind}Config")(**sizes)


def random_gpt(draw: random.Random, kind: str) -> transformers.PretrainedConfig:
    heads, layers, inner = draw.randint(4, 6), draw.randint(2, 3), 16 * draw.randint(4, 9)
    hidden = heads * 16
    old = {"vocab_size": VOCAB, "n_positions": 2048, "n_embd": hidden, "n_layer": layers, "n_head": heads}
    new = {"vocab_size": VOCAB, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    parallel = draw.random() < 0.5
    settings: dict[str, dict[str, object]] = {
        "GPT2": {**old, "n_inner": inner, "activation_function": draw.choice(("relu", "gelu", "silu"))},
        "GPTJ": {**old, "n_inner": inner, "rotary_dim": 8},
        "GPTNeo": {
            "vocab_size": VOCAB,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_layers": 2,
            "num_heads": heads,
            "max_position_embeddings": 2048,
            "window_size": 40,
            "attention_types": [[["global", "local"], 1]],
        },
        "Bloom": {"vocab_size": VOCAB, "hidden_size": hidden, "n_layer": layers, "n_head": heads},
        "Falcon": {
            **new,
            "max_position_embeddings": 2048,
            "bias": draw.random() < 0.5,
            "parallel_attn": parallel,
            "multi_query": draw.random() < 0.5,
            "alibi": draw.random() < 0.5,
        },
        "Mpt": {
            "vocab_size": VOCAB,
            "max_seq_len": 2048,
            "d_model": hidden,
            "n_layers": layers,
            "n_heads": heads,
            "attn_config": {"clip_qkv": 2.0},
        },
    }
    return getattr(transformers, f"{kind}Config")(**settings[kind], **ENDS)


def save_random(config: transformers.PretrainedConfig, folder: Path, seed: int = 1) -> Path:
    random_model(config, seed).save_pretrained(folder)
    return folder


def random_model(config: transformers.PretrainedConfig, seed: int) -> transformers.PreTrainedModel:
    """A model of noise, biases and norms included."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = noise * 0.3 if parameter.dim() > 1 else parameter.data + 0.1 * noise
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):  # zeros in a new model, and ones
            buffer.add_(0.2 * torch.randn_like(buffer))
    model.tie_weights()
    return model
