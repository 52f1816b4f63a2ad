"""Says from config.json alone which models are refused, so that nobody waits for weights, and which are tested."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_worker.models.decoders.config import LLAMA_LIKE, is_llama_like
from gpu_worker.models.decoders.gpt_families import FAMILIES
from octavo.model_files import quantization
from octavo.request.errors import BadModel

# Ends of the class names by which Transformers says that a model has an output projection for the next token.
CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel", "WithLMHead", "GenerationDecoder")

# Encoders that Transformers also runs as decoders, if the configuration says so.
ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)

# Models with a state that each token changes. A configuration that lists its layers is read by that list instead.
RECURRENT = (
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba"),
    *("mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma"),
    *("rwkv", "xlstm", "zamba", "zamba2"),
)
RECURRENT_LAYERS = ("conv", "hybrid", "linear_attention", "mamba", "mamba2", "recurrent", "short_conv")


def refuse_unservable(name: str, config: Mapping[str, Any]) -> None:
    """BadModel, with the reason, if the content of config.json says that octavo cannot serve this model.

    A model that passes may still be refused by what its weights are or by how it computes.
    """
    reason = _reason(config)
    if reason:
        raise BadModel(f"{name}: {reason}")


def _reason(config: Mapping[str, Any]) -> str:
    """Why the model is refused; empty if it is not."""
    kind = config.get("model_type") or "a model without model_type"
    if config.get("is_encoder_decoder"):
        return f"{kind} is an encoder-decoder (is_encoder_decoder); octavo serves decoders"
    if kind in ENCODERS and not config.get("is_decoder"):
        return f"{kind} is an encoder (is_decoder is not set): it fills gaps and predicts no next token"
    classes = config.get("architectures") or []
    ends = (*CAUSAL_CLASSES, "Model") if is_llama_like(config) else CAUSAL_CLASSES  # embedding models have no head
    if classes and not any(str(name).endswith(ends) for name in classes):
        return f"{', '.join(map(str, classes))} predicts no next token; language models have a class …ForCausalLM"
    if config.get("kv_lora_rank"):
        return (
            f"{kind} has multi-head latent attention (MLA, kv_lora_rank {config['kv_lora_rank']}): "
            "its cache is one compressed vector per token, which blocks of keys and values do not hold"
        )
    if recurrent := _recurrent_layers(kind, config):
        return f"{kind} keeps a recurrent state between tokens ({recurrent}), which blocks do not hold"
    if config.get("quantization_config") is None:
        return ""
    is_read = is_llama_like(config) or quantization.is_mxfp4(config)
    return quantization.find_obstacle(config) or ("" if is_read else _only_llama(kind))


def _recurrent_layers(kind: str, config: Mapping[str, Any]) -> str:
    """What keeps a recurrent state; empty: nothing that the configuration tells of."""
    layers = config.get("layer_types") or config.get("layers_block_type") or config.get("block_types")
    if isinstance(layers, Sequence) and not isinstance(layers, str):
        found = sorted({str(layer) for layer in layers} & set(RECURRENT_LAYERS))
        return f"layers of kind {', '.join(found)}" if found else ""
    return "all its layers or some" if kind in RECURRENT else ""


def _only_llama(kind: str) -> str:
    return (
        f"quantized weights are read for Llama-like models, and this {kind} has an activation or rotary positions that "
        "those do not have: use a checkpoint that is not quantized"
    )


OWN_DECODERS: dict[str, str] = dict.fromkeys((*LLAMA_LIKE, *quantization.MIXTURES), "llama") | dict.fromkeys(
    FAMILIES, "gpt"
)
THROUGH_TRANSFORMERS = (
    *("afmoe", "apertus", "arcee", "biogpt", "cohere", "cohere2", "cwm", "ernie4_5", "ernie4_5_moe", "exaone4"),
    *("flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_bigcode", "gpt_neox"),
    *("gpt_oss", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("jetmoe", "ministral", "ministral3", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt"),
    *("persimmon", "phi", "phimoe", "seed_oss", "stablelm", "starcoder2", "vaultgemma"),
)
