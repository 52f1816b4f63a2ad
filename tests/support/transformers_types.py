"""Configurations of tiny models, one or more for each `model_type` that runs through Transformers."""

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
WIDE = {**SMALL, "head_dim": 16}
WINDOWED = {"sliding_window": 11}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
BIG_CODE = {"vocab_size": 128, "n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 4}
NO_ENDS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}

NARROW = {**EXPERTS, "moe_intermediate_size": 32}
MANY = {"num_experts": 24, "num_experts_per_tok": 5, "moe_intermediate_size": 40}
SHARED = {"shared_expert_intermediate_size": 48}
# With experts that octavo runs itself.
MIXTURES: dict[str, tuple[str, dict]] = {
    "mixtral": ("Mixtral", {**SMALL, **LOCAL_EXPERTS}),
    "mixtral-windowed": ("Mixtral", {**SMALL, **WINDOWED, **LOCAL_EXPERTS}),
    "qwen2_moe": ("Qwen2Moe", {**SMALL, **NARROW, **SHARED}),
    "qwen2_moe-some": ("Qwen2Moe", {**SMALL, **NARROW, **SHARED, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "qwen3_moe": ("Qwen3Moe", {**WIDE, **NARROW}),
    "qwen3_moe-many": ("Qwen3Moe", {**WIDE, **MANY, "norm_topk_prob": True, "mlp_only_layers": [1]}),
}

# By a name for the test: the class of the configuration (without "Config"), and its fields.
TYPES: dict[str, tuple[str, dict]] = {
    "afmoe": ("Afmoe", {**WIDE, **WINDOWED, **EXPERTS, "moe_intermediate_size": 32}),
    "apertus": ("Apertus", SMALL),
    "arcee": ("Arcee", SMALL),
    "biogpt": ("BioGpt", {**SMALL, "pad_token_id": 1, "num_key_value_heads": 4}),
    "cohere": ("Cohere", {**SMALL, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {**WIDE, **WINDOWED}),
    "cwm": ("Cwm", {**WIDE, **WINDOWED, "bos_token_id": 0}),
    "ernie4_5": ("Ernie4_5", WIDE),
    "ernie4_5_moe": ("Ernie4_5_Moe", {**SMALL, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "exaone4": ("Exaone4", {**SMALL, **WINDOWED}),
    "flex_olmo": ("FlexOlmo", {**SMALL, **EXPERTS}),
    "gemma": ("Gemma", {**WIDE, "tie_word_embeddings": False}),
    "glm": ("Glm", WIDE),
    "glm4": ("Glm4", WIDE),
    "glm4_moe": ("Glm4Moe", {**WIDE, **ROUTED_EXPERTS}),
    "gpt_bigcode": ("GPTBigCode", {**BIG_CODE, **NO_ENDS}),
    "gpt_bigcode-many-heads": ("GPTBigCode", {**BIG_CODE, **NO_ENDS, "multi_query": False}),
    "granite": (
        "Granite",
        {
            **SMALL,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoe": ("GraniteMoe", {**SMALL, **LOCAL_EXPERTS}),
    "granitemoeshared": ("GraniteMoeShared", {**SMALL, **LOCAL_EXPERTS, "shared_intermediate_size": 32}),
    "helium": ("Helium", {**SMALL, "head_dim": 8}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", WIDE),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {**WIDE, "num_experts": 4, "moe_topk": 2}),
    "jetmoe": ("JetMoe", {**SMALL, "kv_channels": 8, "num_local_experts": 4}),
    "ministral": ("Ministral", {**WIDE, **WINDOWED}),
    "ministral3": ("Ministral3", WIDE),
    "nemotron": ("Nemotron", SMALL),
    "olmo": ("Olmo", {**SMALL, "clip_qkv": 0.5}),
    "olmo2": ("Olmo2", SMALL),
    "olmo3": ("Olmo3", {**SMALL, **WINDOWED}),
    "olmoe": ("Olmoe", {**SMALL, **EXPERTS}),
    "opt-350m": (
        "OPT",
        {
            "vocab_size": 128,
            "hidden_size": 48,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
            **NO_ENDS,
        },
    ),
    "persimmon": ("Persimmon", {**SMALL, "num_key_value_heads": 4}),
    "phimoe": ("Phimoe", {**SMALL, **LOCAL_EXPERTS}),
    "seed_oss": ("SeedOss", WIDE),
    "stablelm": ("StableLm", SMALL),
    "stablelm-parallel": (
        "StableLm",
        {**SMALL, "use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    "starcoder2": ("Starcoder2", {**SMALL, **WINDOWED}),
    "starcoder2-unwindowed": ("Starcoder2", {**SMALL, "sliding_window": None}),
    "vaultgemma": ("VaultGemma", {**WIDE, **WINDOWED, "tie_word_embeddings": False}),
}
