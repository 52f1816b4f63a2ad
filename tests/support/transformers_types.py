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
MIXED = {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA4 = {**WIDE, **MIXED, "per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}}}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
GEMMA = {**WIDE, **WINDOWED, "num_hidden_layers": 7, "tie_word_embeddings": False}
SCALES = {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 2.0}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
AUDIO = {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32}
NO_ENDS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}

NARROW = {**EXPERTS, "moe_intermediate_size": 32}
MANY = {"num_experts": 24, "num_experts_per_tok": 5, "moe_intermediate_size": 40}
SHARED = {"shared_expert_intermediate_size": 32}
WIDER = {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2, "norm_topk_prob": True}
GROUPED = {**ROUTED_EXPERTS, "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
OSS = {**WIDE, **LOCAL_EXPERTS, **WINDOWED, "swiglu_limit": 1.0}
SHARP = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
# Without experts, beside Llama's own variations, that octavo runs itself.
DENSE: dict[str, tuple[str, dict]] = {
    "exaone4": ("Exaone4", {**SMALL, **WINDOWED}),
    "gemma": ("Gemma", {**WIDE, "tie_word_embeddings": False}),
    "granite": ("Granite", {**SMALL, **SCALES}),
    "olmo2": ("Olmo2", SMALL),
    "olmo3": ("Olmo3", {**SMALL, **WINDOWED}),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3Text", GEMMA),
    "gemma3-scaled": (
        "Gemma3Text",
        {**GEMMA, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20, "attention_bias": True}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": DEFAULT_ROPE}},
    ),
    "granite-biased": ("Granite", {**SMALL, **SCALES, "attention_bias": True, "mlp_bias": True}),
}
# With experts that octavo runs itself.
MIXTURES: dict[str, tuple[str, dict]] = {
    "mixtral": ("Mixtral", {**SMALL, **LOCAL_EXPERTS}),
    "mixtral-windowed": ("Mixtral", {**SMALL, **WINDOWED, **LOCAL_EXPERTS}),
    "qwen2_moe": ("Qwen2Moe", {**SMALL, **NARROW, **SHARED}),
    "qwen2_moe-some": ("Qwen2Moe", {**SMALL, **NARROW, **WIDER}),
    "qwen3_moe": ("Qwen3Moe", {**WIDE, **NARROW}),
    "qwen3_moe-many": ("Qwen3Moe", {**WIDE, **MANY, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "olmoe": ("Olmoe", {**SMALL, **EXPERTS}),
    "olmoe-normed": ("Olmoe", {**SMALL, **EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
    "glm4_moe": ("Glm4Moe", {**WIDE, **ROUTED_EXPERTS, "use_qk_norm": True}),
    "glm4_moe-grouped": (
        "Glm4Moe",
        {**WIDE, **GROUPED, "attention_bias": True, "routed_scaling_factor": 1.5, "n_shared_experts": 2}
        | {"first_k_dense_replace": 2, "norm_topk_prob": False},
    ),
    "gpt_oss": ("GptOss", {**OSS, "rope_parameters": SHARP}),
    "gpt_oss-many": ("GptOss", {**OSS, "num_local_experts": 9, "num_experts_per_tok": 4, "num_key_value_heads": 4}),
    "dots1": ("Dots1", {**SMALL, **GROUPED, **WINDOWED, "n_shared_experts": 1, "max_window_layers": 2}),
    "solar_open": ("SolarOpen", {**WIDE, **ROUTED_EXPERTS}),
    "minimax_m2": ("MiniMaxM2", {**WIDE, **LOCAL_EXPERTS, "rotary_dim": 8}),
    "exaone_moe": ("ExaoneMoe", {**SMALL, **WINDOWED, **NARROW}),
    "hy_v3": ("HYV3", {**WIDE, **NARROW}),
}

LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

FEW_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
MINICPM3 = {**LATENT, "dim_model_base": 16, "scale_emb": 2, "scale_depth": 1.4, "tie_word_embeddings": False}
# With latent attention, that octavo runs itself.
LATENTS: dict[str, tuple[str, dict]] = {
    "deepseek_v2": ("DeepseekV2", {**LATENT, **ROUTED_EXPERTS}),
    "deepseek_v2-lite": ("DeepseekV2", {**LATENT, **ROUTED_EXPERTS, "q_lora_rank": None, "attention_bias": True}),
    "deepseek_v2-grouped": (
        "DeepseekV2",
        {**LATENT, **ROUTED_EXPERTS, **FEW_GROUPS, "topk_method": "group_limited_greedy", "attention_bias": True},
    ),
    "deepseek_v2-odd": ("DeepseekV2", {**LATENT, **ROUTED_EXPERTS, "kv_lora_rank": 24, "n_shared_experts": 1}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, **ROUTED_EXPERTS, "v_head_dim": 32}),
    "deepseek_v3-grouped": ("DeepseekV3", {**LATENT, **ROUTED_EXPERTS, **FEW_GROUPS, "rope_parameters": STRETCHED}),
    "deepseek_v3-halves": (
        "DeepseekV3",
        {**LATENT, **ROUTED_EXPERTS, "rope_interleave": False, "q_lora_rank": None, "norm_topk_prob": False},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, **ROUTED_EXPERTS}),
    "minicpm3": ("MiniCPM3", MINICPM3),
    "minicpm3-biased": ("MiniCPM3", {**MINICPM3, "attention_bias": True, "mlp_bias": True, "dim_model_base": None}),
    "youtu": ("Youtu", LATENT),
}

DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
THREE_LINEAR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
KIMI = {**LATENT, **ROUTED_EXPERTS, **THREE_LINEAR, "num_local_experts": 4}
SCAN = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
ALONE = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 3, **NO_ENDS}
CONVOLUTIONS = {**SMALL, "layer_types": ["conv", "full_attention", "conv", "conv"]}

# With a state beside keys and values, or in their place.
STATEFUL: dict[str, tuple[str, dict]] = {
    "bailing_hybrid": ("BailingHybrid", {**KIMI, "head_dim": 16, "mlp_layer_types": ["dense"] + ["sparse"] * 3}),
    "bamba": ("Bamba", {**SMALL, **SCAN, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", {**WIDE, **SCAN, "mamba_d_ssm": 64}),
    "falcon_mamba": ("FalconMamba", {**ALONE, "state_size": 8}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**SMALL, **SCALES, **SCAN, **LOCAL_EXPERTS, "shared_intermediate_size": 32}
        | {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    ),
    "jamba": (
        "Jamba",
        {**SMALL, **EXPERTS, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 4, "attn_layer_offset": 1}
        | {"expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    "kimi_linear": (
        "KimiLinear",
        {**KIMI, "linear_head_dim": 16, "linear_num_heads": 4, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    ),
    "lfm2": ("Lfm2", {**CONVOLUTIONS, "conv_bias": True, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2Moe", {**CONVOLUTIONS, **NARROW, "num_dense_layers": 1}),
    "lfm3": ("Lfm3", SMALL),
    "mamba": ("Mamba", {**ALONE, "state_size": 8}),
    "mamba2": ("Mamba2", {**ALONE, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2}),
    "nemotron_h": (
        "NemotronH",
        {**WIDE, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2}
        | {"layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"]},
    ),
    "olmo_hybrid": ("OlmoHybrid", {**SMALL, **DELTA, **THREE_LINEAR, "linear_num_key_heads": 4}),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", {**WIDE, **NARROW, **SHARED, **DELTA, **THREE_LINEAR}),
    "qwen3_5_text": ("Qwen3_5Text", {**WIDE, **DELTA, **THREE_LINEAR}),
    "qwen3_next": ("Qwen3Next", {**WIDE, **NARROW, **SHARED, **DELTA, **THREE_LINEAR}),
}

# By a name for the test: the class of the configuration (without "Config"), and its fields.
TYPES: dict[str, tuple[str, dict]] = {
    "afmoe": ("Afmoe", {**WIDE, **WINDOWED, **EXPERTS, "moe_intermediate_size": 32}),
    "apertus": ("Apertus", SMALL),
    "arcee": ("Arcee", SMALL),
    "axk1": ("AXK1", {**LATENT, **ROUTED_EXPERTS}),
    "aria_text": ("AriaText", {**SMALL, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "beam": ("Beam", {**WIDE, **MIXED, **NARROW, "n_group": 2, "topk_group": 1}),
    "biogpt": ("BioGpt", {**SMALL, "pad_token_id": 1, "num_key_value_heads": 4}),
    "bitnet": ("BitNet", SMALL),
    "cohere": ("Cohere", {**SMALL, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {**WIDE, **WINDOWED}),
    "cohere2_moe": (
        "Cohere2Moe",
        {**WIDE, **WINDOWED, **EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 1}
        | {"prefix_dense_intermediate_size": 48},
    ),
    "cohere_compass_text": (
        "CohereCompassText",
        {**SMALL, **MIXED, "rope_parameters": {"sliding_attention": DEFAULT_ROPE, "full_attention": None}},
    ),
    "ctrl": ("CTRL", {**BIG_CODE, **NO_ENDS, "dff": 48, "tie_word_embeddings": False}),
    "cwm": ("Cwm", {**WIDE, **WINDOWED, "bos_token_id": 0}),
    "dbrx": (
        "Dbrx",
        {"vocab_size": 128, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128, **NO_ENDS}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4}}
        | {"ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "ernie4_5": ("Ernie4_5", WIDE),
    "ernie4_5_moe": ("Ernie4_5_Moe", {**SMALL, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "flex_olmo": ("FlexOlmo", {**SMALL, **EXPERTS}),
    "flint": ("Flint", {**WIDE, **MIXED, **NARROW, **SHARED}),
    "fuyu": ("Fuyu", {"text_config": {**SMALL, "num_key_value_heads": 4, "model_type": "persimmon"}}),
    "gemma3n_text": (
        "Gemma3nText",
        {**WIDE, **MIXED, "tie_word_embeddings": False, "vocab_size_per_layer_input": 128, "laurel_rank": 8}
        | {"hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0]}
        | {"num_kv_shared_layers": 2},
    ),
    "gemma4_text": ("Gemma4Text", {**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}),
    "gemma4-few": (
        "Gemma4Text",
        {**GEMMA4, "per_layer_config": {each: {"head_dim": 24, "num_key_value_heads": 1} for each in ("1", "3")}}
        | {"attention_k_eq_v": True, "tie_word_embeddings": False}
        | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    ),
    "gemma4-shared": (
        "Gemma4Text",
        {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128},
    ),
    "gemma4-experts": (
        "Gemma4Text",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
        | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    ),
    "gemma4_unified_text": ("Gemma4UnifiedText", GEMMA4),
    "glm": ("Glm", WIDE),
    "glm4": ("Glm4", WIDE),
    "gpt_bigcode": ("GPTBigCode", {**BIG_CODE, **NO_ENDS}),
    "gpt_bigcode-many-heads": ("GPTBigCode", {**BIG_CODE, **NO_ENDS, "multi_query": False}),
    "granite_swa": ("GraniteSWA", {**SMALL, **SCALES, **WINDOWED, "layer_rope_theta": [1e4, 0, 1e6, 1e4]}),
    "granitemoe": ("GraniteMoe", {**SMALL, **LOCAL_EXPERTS}),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        {**SMALL, **SCALES, **WINDOWED, **LOCAL_EXPERTS, "shared_intermediate_size": 32}
        | {"layer_rope_theta": [1e4, 0, 1e6, 1e4]},
    ),
    "granitemoeshared": ("GraniteMoeShared", {**SMALL, **LOCAL_EXPERTS, "shared_intermediate_size": 32}),
    "helium": ("Helium", {**SMALL, "head_dim": 8}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", WIDE),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {**WIDE, "num_experts": 4, "moe_topk": 2}),
    "hyperclovax": ("HyperCLOVAX", {**WIDE, **SCALES}),
    "jais2": ("Jais2", SMALL),
    "jetmoe": ("JetMoe", {**SMALL, "kv_channels": 8, "num_local_experts": 4}),
    "kolibri1": ("Kolibri1", {**WIDE, **MIXED, **NARROW, **SHARED}),
    "laguna": ("Laguna", {**WIDE, **MIXED, **NARROW, **SHARED}),
    "laguna-many-heads": (
        "Laguna",
        {**WIDE, **MIXED, **NARROW, **SHARED, "num_attention_heads_per_layer": [4, 8, 4, 8]}
        | {"gating": "per-dim", "moe_router_logit_softcapping": 2.0},
    ),
    "longcat_flash": (
        "LongcatFlash",
        {**LATENT, "num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "n_routed_experts": 4}
        | {"zero_expert_num": 2, "moe_topk": 2, "head_dim": 8},
    ),
    "mellum": ("Mellum", {**WIDE, **MIXED, **NARROW, "mlp_layer_types": ["dense", "sparse"] * 2}),
    "ministral": ("Ministral", {**WIDE, **WINDOWED}),
    "ministral3": ("Ministral3", WIDE),
    "modernbert-decoder": (
        "ModernBertDecoder",
        {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
        | {"num_attention_heads": 4, "max_position_embeddings": 128, "local_attention": 22}
        | {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None},
    ),
    "moshi": ("Moshi", {**SMALL, "ffn_dim": 64}),
    "nanochat": ("NanoChat", {**WIDE, "final_logit_softcapping": 3.0}),
    "nemotron": ("Nemotron", SMALL),
    "olmo": ("Olmo", {**SMALL, "clip_qkv": 0.5}),
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
    "phi4_multimodal": (
        "Phi4Multimodal",
        {**SMALL, "original_max_position_embeddings": 128}
        | {"vision_config": {**TOWER, "image_size": 32, "crop_size": 32, "patch_size": 8, "num_hidden_layers": 1}}
        | {"audio_config": {**TOWER, **AUDIO, "num_blocks": 1, "input_size": 16, "nemo_conv_channels": 8}},
    ),
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
    **STATEFUL,
}
