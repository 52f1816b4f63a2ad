"""The configuration of a Llama-like decoder, and how it is read from a Transformers configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpu_worker.models.decoders import rope
from gpu_worker.models.decoders.expert_families import DEFAULTS, expert_layers, read_experts_config
from gpu_worker.models.decoders.experts import ExpertsConfig
from gpu_worker.models.decoders.latent.latent_config import FAMILIES as LATENT
from gpu_worker.models.decoders.latent.latent_config import LatentConfig, read_latent
from gpu_worker.models.decoders.rope import RopeParameters
from gpu_worker.ops import BlockSparsePattern
from octavo.model_files.quantization import CODED, MIXTURES, is_mxfp4
from octavo.model_files.quantization import LLAMA_LIKE as LLAMA_LIKE
from octavo.request.errors import BadModel

# More than any model has. What a configuration says is used before the tensors could contradict it.
MOST = {
    "num_layers": 4096,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "context_tokens": 1 << 24,
}
LLAMAS = ("llama", "internlm3", "iquestcoder")  # model types whose code in Transformers is Llama's
GEMMAS = ("gemma", "gemma2", "gemma3_text")
# Families of which the last of so many layers sees all keys, and the others have a window.
PERIODS = {"exaone4": 4, "exaone_moe": 4, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4}
ALWAYS_WINDOWED = ("mistral", "mixtral", "phi3", "dots1", *PERIODS)  # a window in the configuration needs no switch
HEADS_NORMED = ("qwen3", "qwen3_moe", "dots1", "exaone4", "exaone_moe", "gemma3_text", "hy_v3")  # each head by itself
TOGETHER_NORMED = ("olmoe", "olmo2", "olmo3", "minimax_m2")  # all heads as one row

Norms = tuple[tuple[str, str], ...]  # of a layer: our names, and those in checkpoints
BEFORE: Norms = (("input_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm"))
AFTER: Norms = (("attended_norm", "post_attention_layernorm"), ("output_norm", "post_feedforward_layernorm"))
AROUND: Norms = (("input_norm", "input_layernorm"), ("mlp_norm", "pre_feedforward_layernorm"), *AFTER)


def unreadable(error: Exception) -> BadModel:
    """The error for a config.json in which a value is missing or of no use, with what to do about it."""
    what = f"has no {error}" if isinstance(error, KeyError) else f"cannot be used: {type(error).__name__}: {error}"
    return BadModel(f"config.json {what}: copy it again from where the model came from")


def check_sizes(**sizes: int) -> None:
    """BadModel unless each size, by its name in MOST, is one that a model can have."""
    for name, size in sizes.items():
        if not 1 <= size <= MOST[name]:
            raise BadModel(f"config.json: {name} is {size}, and octavo runs models with 1 to {MOST[name]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes and variations, as LlamaDecoder computes them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    norm_eps: float
    rope: RopeParameters
    near_rope: RopeParameters | None = None  # of layers with a window; None: `rope`
    windows: tuple[int, ...]  # per layer: how many keys a query sees; 0: all
    sparse: tuple[BlockSparsePattern | None, ...]  # per layer
    rotated: tuple[bool, ...]  # per layer: whether positions are encoded at all
    tied: bool  # the output projection is the embedding, unless the checkpoint has another one
    biased: frozenset[str] = frozenset()  # which matrices of a layer have biases: qkv, out, gate_up, down
    head_norms: bool = False  # whether queries and keys are normed head by head
    together_normed: bool = False  # or those of all heads together
    sinks: bool = False  # whether a score without a value takes part in each head's softmax
    norms: Norms = BEFORE  # what attention and MLP take is normed, or what they give, or both
    norm_offset: float = 0.0  # what is added to the norms' weights in checkpoints, in float32
    activation: str = "silu"  # of the gate; or "gelu_tanh"
    query_scalar: float = 0.0  # scores are divided by its square root; 0: by that of head_dim
    attention_cap: float = 0.0  # soft caps of scores and logits, as in AttentionOptions; 0: none
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    sum_scale: float = 1.0  # what attention and MLP give is multiplied with it before it is added
    logit_divisor: float = 1.0
    experts: ExpertsConfig | None = None
    expert_layers: tuple[bool, ...] = ()  # per layer, of a model with experts
    drafting_layers: int = 0  # of the checkpoint, after those of the model: they draft tokens, and are not used
    latent: LatentConfig | None = None  # then num_kv_heads is 1, and head_dim what a page holds of a token
    pairs_rows: bool = False  # whether the family's own rows of queries and keys come in pairs, also in its adapters

    @property
    def attention_scale(self) -> float:
        return self.latent.scale if self.latent else float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def post_norms(self) -> bool:
        """Whether what attention and MLP give is normed before it is added."""
        return "attended_norm" in dict(self.norms)

    @property
    def qkv_rows(self) -> list[int]:
        """How many rows a matrix of queries, keys and values has of each; with latents, of what queries are made of and
        of what a page holds."""
        if self.latent:
            return [self.latent.query_rank or self.num_heads * self.latent.query, self.head_dim]
        keys = self.num_kv_heads * self.head_dim
        return [self.num_heads * self.head_dim, keys, keys]

    @property
    def attended(self) -> int:
        """How many numbers of a token attention gives."""
        return self.num_heads * (self.latent.values if self.latent else self.head_dim)

    def limited_to(self, context_tokens: int | None) -> "LlamaConfig":
        """This model, for sequences of at most so many tokens; None: as many as it was made for."""
        return replace(self, context_tokens=min(self.context_tokens, context_tokens or self.context_tokens))

    def rounded_to(self, dtype: torch.dtype) -> "LlamaConfig":
        """This model with the scale of embeddings as Transformers rounds it before it multiplies, of Gemma alone."""
        if not self.norm_offset:
            return self
        return replace(self, embedding_scale=torch.tensor(self.embedding_scale, dtype=dtype).item())

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Reads the content of config.json. BadModel if a value is missing or contradicts another."""
        try:
            return cls._read(config)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise unreadable(error) from error

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        config = _whole(config)
        num_layers, num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        latent = read_latent(config, rope.stretch(config))
        head_dim = latent.width if latent else int(config.get("head_dim") or config["hidden_size"] // num_heads)
        num_kv_heads = 1 if latent else int(config.get("num_key_value_heads") or num_heads)
        context_tokens = int(config["max_position_embeddings"])
        check_sizes(num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        check_sizes(context_tokens=context_tokens)
        if num_heads % num_kv_heads:
            raise BadModel(f"config.json: {num_heads} heads do not share {num_kv_heads} key-value heads")
        windows = tuple(_window(config, layer) for layer in range(num_layers))
        family = config.get("model_type")
        far_config, near_config = rope.far_and_near(config)
        far = RopeParameters.from_config(far_config, latent.rotated if latent else head_dim)
        if latent and far.dim != latent.rotated:
            raise BadModel(f"config.json: {far.dim} of {latent.rotated} dimensions turn (partial_rotary_factor)")
        near = RopeParameters.from_config(near_config, head_dim) if near_config else None
        return cls(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config.get("intermediate_size") or config["moe_intermediate_size"]),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            context_tokens=context_tokens,
            norm_eps=float(config["rms_norm_eps"]),
            rope=far,
            near_rope=None if near == far else near,
            windows=windows,
            sparse=tuple(_sparse(config, layer, num_heads) for layer in range(num_layers)),
            rotated=_rotated(config, windows),
            tied=bool(config.get("tie_word_embeddings", False)),
            **_variations(config),
            biased=_biased(config),
            head_norms=family in HEADS_NORMED or (family == "glm4_moe" and bool(config.get("use_qk_norm", False))),
            together_normed=family in TOGETHER_NORMED,
            sinks=family == "gpt_oss",
            experts=read_experts_config(config),
            expert_layers=expert_layers(config, num_layers),
            drafting_layers=int(config.get("num_nextn_predict_layers") or 0) if family in MIXTURES else 0,
            latent=latent,
            pairs_rows=family == "ernie4_5",
        )


def is_llama_like(config: Mapping[str, Any]) -> bool:
    """Whether LlamaDecoder computes what this configuration of Transformers means, with every setting in it."""
    return (
        config.get("model_type") in LLAMA_LIKE
        and _is_activation_known(config)
        and all(rope.kind(each) in rope.KINDS for each in rope.far_and_near(config) if each is not None)
        and not config.get("use_bidirectional_attention")
        and not (config["model_type"] == "iquestcoder" and (config.get("clip_qkv") or config.get("use_sliding_window")))
    )


def _is_activation_known(config: Mapping[str, Any]) -> bool:
    """Gemma's first files say `gelu`, and mean that by tanh."""
    if config["model_type"] not in GEMMAS:
        return config.get("hidden_act", "silu") in ("silu", "swish")
    named = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
    return named == "gelu_pytorch_tanh" or (named == "gelu" and config["model_type"] == "gemma")


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Whether the extension computes what this configuration of a mixture of experts means."""
    # Transformers masks otherwise.
    windowed = config.get("use_sliding_window") and config.get("model_type") not in ("mixtral", *LATENT)
    return (
        config.get("model_type") in MIXTURES
        and config.get("hidden_act", "silu") in ("silu", "swish")
        and (config.get("quantization_config") is None or is_mxfp4(config) or config["model_type"] in CODED)
        and rope.kind(config) in rope.KINDS
        and not windowed
        and config.get("clip_qkv") is None
        and not (config["model_type"] == "deepseek_v2" and (config.get("norm_topk_prob") or config.get("mlp_bias")))
    )


def _whole(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with the values that its family has where it names none."""
    family = str(config.get("model_type"))
    config = {**DEFAULTS.get(family, {}), **config}
    if family == "minimax_m2" and config.get("rotary_dim"):
        return {"partial_rotary_factor": config["rotary_dim"] / config["head_dim"], **config}
    return config


def _rotated(config: Mapping[str, Any], windows: tuple[int, ...]) -> tuple[bool, ...]:
    """In which layers positions are encoded."""
    if config.get("model_type") in ("exaone4", "exaone_moe") and config.get("sliding_window"):
        return tuple(window > 0 for window in windows)
    no_rope = (config.get("no_rope_layers") if config.get("model_type") == "smollm3" else None) or [1] * len(windows)
    return tuple(bool(no_rope[layer]) for layer in range(len(windows)))


def _variations(config: Mapping[str, Any]) -> dict[str, Any]:
    """What families compute otherwise than Llama's, as fields of LlamaConfig."""
    family = config.get("model_type")
    if family in ("exaone4", "olmo2", "olmo3"):
        return {"norms": AFTER}
    if family == "granite":
        names = {"embedding_scale": "embedding_multiplier", "sum_scale": "residual_multiplier"}
        scales = {field: float(config.get(name, 1.0)) for field, name in names.items()}
        query_scalar = float(config.get("attention_multiplier", 1.0)) ** -2
        return scales | {"query_scalar": query_scalar, "logit_divisor": float(config.get("logits_scaling", 1.0))}
    if family == "minicpm3":
        layers, base = int(config["num_hidden_layers"]), config.get("dim_model_base") or config["hidden_size"]
        depth = config.get("scale_depth") or layers**0.5
        return {
            "embedding_scale": float(config.get("scale_emb", 1.0)),
            "sum_scale": float(depth) / layers**0.5,
            "logit_divisor": config["hidden_size"] / base,
        }
    if family not in GEMMAS:
        return {}
    gemma = {
        "activation": "gelu_tanh",
        "embedding_scale": float(int(config["hidden_size"]) ** 0.5),
        "norm_offset": 1.0,
    }
    if family == "gemma":
        return gemma
    return gemma | {
        "norms": AROUND,
        "query_scalar": float(config["query_pre_attn_scalar"]),
        "attention_cap": float(config.get("attn_logit_softcapping") or 0) if family == "gemma2" else 0.0,
        "logit_cap": float(config.get("final_logit_softcapping") or 0),
    }


def _biased(config: Mapping[str, Any]) -> frozenset[str]:
    """The matrices of a layer that have biases. Each family of models has its own rule for it."""
    family = config.get("model_type")
    if family in ("qwen2", "qwen2_moe"):
        return frozenset({"qkv"} if config.get("qkv_bias", True) else ())
    if family in ("glm4_moe", "solar_open"):
        return frozenset({"qkv"} if config.get("attention_bias") else ())
    if family == "internlm3":  # which also has names of its own
        config = {"attention_bias": config.get("qkv_bias"), "mlp_bias": config.get("bias"), **config}
    attention = {"qkv", "out"} if family not in ("mistral", "phi3") and config.get("attention_bias") else set()
    with_mlp = (*LLAMAS, "granite", "minicpm3", "smollm3")
    mlp = {"gate_up", "down"} if family in with_mlp and config.get("mlp_bias") else set()
    return frozenset(attention | mlp)


def _sparse(config: Mapping[str, Any], layer: int, num_heads: int) -> BlockSparsePattern | None:
    """The block-sparse pattern of `layer`, by the names of Phi-3-small's configuration; None: it sees all keys."""
    stride, dense_every = (
        int(config.get(name) or 0) for name in ("blocksparse_vert_stride", "dense_attention_every_n_layers")
    )
    if stride <= 1 or (dense_every and (layer + 1) % dense_every == 0):
        return None
    local, size = (int(config.get(f"blocksparse_{name}") or 0) for name in ("num_local_blocks", "block_size"))
    if local < 1 or size < 1:
        raise BadModel(f"config.json: block-sparse attention to {local} blocks of {size} keys")
    step = 0 if config.get("blocksparse_homo_head_pattern") else max(1, stride // num_heads)
    return BlockSparsePattern(local_blocks=local, vert_stride=stride, block_size=size, head_step=step)


def _window(config: Mapping[str, Any], layer: int) -> int:
    """How many keys a query of `layer` sees; 0: all. Each family of models has its own switch for it."""
    window = int(config.get("sliding_window") or 0)
    family = config.get("model_type")
    is_windowed = family in PERIODS or config.get("use_sliding_window", family in ALWAYS_WINDOWED)
    if family in (*LLAMAS, *LATENT, "minimax_m2") or not is_windowed:
        return 0
    kinds = config.get("layer_types")
    if family in ("mistral", "mixtral", "phi3"):
        return window
    if kinds:
        return window if kinds[layer] == "sliding_attention" else 0
    if family == "smollm3":
        no_rope = config.get("no_rope_layers")
        return window if no_rope and not no_rope[layer] else 0
    if family in PERIODS:
        pattern = config.get("sliding_window_pattern") or PERIODS[family]
        near = pattern[layer % len(pattern)] == "L" if isinstance(pattern, str) else (layer + 1) % int(pattern) != 0
        return window if near else 0
    return window if layer >= int(config.get("max_window_layers", 0)) else 0
