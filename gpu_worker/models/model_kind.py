"""Says from config.json alone which models are refused, so that nobody waits for weights, and which are tested."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_worker.models.decoders.config import LLAMA_LIKE, is_llama_like
from gpu_worker.models.decoders.gpt_families import FAMILIES
from octavo.model_files import quantization
from octavo.model_files.quantization import ENCODED, PICTURES, SPEECH
from octavo.request.errors import BadModel

# Ends of the class names by which Transformers says that a model has an output projection for the next token.
CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel", "WithLMHead", "GenerationDecoder")

# Encoders that Transformers also runs as decoders, if the configuration says so.
ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)

# Models of an encoder and a decoder that are not served.
ENCODER_DECODERS = ("bigbird_pegasus", "led", "mvp", "prophetnet", "trocr")
CONDITIONAL_CLASSES = ("ForConditionalGeneration", "MTModel")  # ends of class names of both with an output projection

# Models that take or give images or sound beside text.
MODALITIES = (
    *("dots3_note", "emu3", "git", "got_ocr2", "llama4", "mllama"),
    *("moss_transcribe_diarize", "musicgen", "musicgen_melody", "qwen4_exp"),
)

# Those whose text alone is served (`text_part`): nothing in it depends on what else they read.
TEXT_PARTS = (
    *("exaone4_5", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "hyperclovax_vision_v2", "idefics2", "idefics3"),
    *("internvl", "lfm2_vl", "lfm3_vl", "llava", "llava_next", "llava_onevision", "minicpmv4_6", "minicpmv4_7"),
    *("mistral3", "ovis2", "qwen3_5", "qwen3_5_moe", "smolvlm", "vipllava"),
)

PARTS = ("text_config", "vision_config", "audio_config", "audio_encoder_config")  # of configurations of such models

# Models with a state that each token changes, in ways that blocks do not hold. A configuration that lists its layers is
# read by that list instead.
RECURRENT = (
    *("inkling2_text", "inkling_text", "minimax", "qwen4_exp_text", "recurrent_gemma", "rwkv"),
    *("xlstm", "zamba", "zamba2", "zaya"),
)
# Models whose state blocks hold beside keys and values, or in their place: they run through Transformers.
STATEFUL = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2"),
    *("lfm2_moe", "lfm3", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text"),
    "qwen3_next",
)
RECURRENT_LAYERS = (
    *("conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "mamba2", "recurrent", "short_conv"),
)

# Models whose attention cannot be replaced, and why. Some others are known by their configuration or by their code.
OWN_ATTENTION = {
    **dict.fromkeys(
        ("cpmant", "gpt_neox_japanese", "openai-gpt", "reformer", "xglm", "xlm", "xlnet"),
        "its code in Transformers computes attention without the interface by which octavo replaces it",
    ),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "it drafts tokens for another model, from that model's keys and values",
    ),
    "blt": "its tokens are bytes, which it reads in patches through a mask of its own",
    "diffllama": "its layers attend twice, and blocks hold the keys and values of one attention",
    "doge": "its layers have a mask of its own, by which a query chooses keys",
    "hrm_text": "its layers run several times for a token, each time with other keys and values",
    "mimo_v2_flash": "its keys and values have different shapes",
}
CHOOSING_LAYERS = (  # kinds of layers where a query does not see all keys, or all of a window
    *("chunked_attention", "compressed_sparse_attention", "deepseek_sparse_attention", "heavily_compressed_attention"),
    *("indexed_attention", "minimax_m3_sparse", "qwen_sparse_attention"),
)


def has_encoder(config: Mapping[str, Any]) -> bool:
    """Whether it is a model of an encoder and a decoder that octavo serves."""
    return config.get("model_type") in (*ENCODED, *SPEECH)


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
    if kind in MODALITIES:
        return _text_alone(kind, config)
    if kind in (*ENCODED, *SPEECH):
        return _with_encoder(kind, config)
    if config.get("is_encoder_decoder") or kind in ENCODER_DECODERS:
        served = ", ".join((*ENCODED, *SPEECH))
        return f"{kind} is an encoder-decoder, or the decoder of one; octavo serves those of the kinds {served}"
    if kind in ENCODERS and not config.get("is_decoder"):
        return f"{kind} is an encoder (is_decoder is not set): it fills gaps and predicts no next token"
    if kind in PICTURES:
        return quantization.find_obstacle(config)
    classes = config.get("architectures") or []
    ends = (*CAUSAL_CLASSES, "Model") if is_llama_like(config) else CAUSAL_CLASSES  # embedding models have no head
    if classes and not any(str(name).endswith(ends) for name in classes):
        if any(isinstance(config.get(part), Mapping) for part in PARTS):
            return _text_alone(kind, config)
        return f"{', '.join(map(str, classes))} predicts no next token; language models have a class …ForCausalLM"
    if kind in OWN_ATTENTION:
        return f"{kind}: {OWN_ATTENTION[kind]}"
    if config.get("index_topk"):
        return (
            f"{kind} chooses the keys that a query sees (index_topk {config['index_topk']}), and pages have no choice"
        )
    if recurrent := _recurrent_layers(kind, config):
        return f"{kind} keeps a recurrent state between tokens ({recurrent}), which blocks do not hold"
    if choosing := _layers_of(config, CHOOSING_LAYERS):
        return f"{kind} has layers of kind {choosing}, whose choice of keys paged attention does not make"
    return quantization.find_obstacle(config)


def _with_encoder(kind: str, config: Mapping[str, Any]) -> str:
    """Why a model with an encoder is refused; empty if it is not."""
    classes = config.get("architectures") or []
    if config.get("is_encoder_decoder") is False:
        return f"this {kind} is the decoder of an encoder-decoder alone (is_encoder_decoder is false); use the whole"
    if classes and not any(str(name).endswith(CONDITIONAL_CLASSES) for name in classes):
        named = ", ".join(map(str, classes))
        return f"{named} is no encoder-decoder with an output; those have a class …ForConditionalGeneration"
    return quantization.find_obstacle(config)


def _recurrent_layers(kind: str, config: Mapping[str, Any]) -> str:
    """What keeps a recurrent state that blocks do not hold; empty: nothing that the configuration tells of."""
    if kind in STATEFUL:
        return ""
    if _kinds_of_layers(config):
        found = _layers_of(config, RECURRENT_LAYERS)
        return f"layers of kind {found}" if found else ""
    return "all its layers or some" if kind in RECURRENT else ""


def _kinds_of_layers(config: Mapping[str, Any]) -> set[str]:
    """The kinds of layers that the configuration lists; empty: it has no such list."""
    layers = config.get("layer_types") or config.get("layers_block_type") or config.get("block_types")
    return {str(layer) for layer in layers} if isinstance(layers, Sequence) and not isinstance(layers, str) else set()


def _layers_of(config: Mapping[str, Any], kinds: Sequence[str]) -> str:
    """Which of these kinds the layers of the configuration have."""
    return ", ".join(sorted(_kinds_of_layers(config) & set(kinds)))


def _text_alone(kind: str, config: Mapping[str, Any]) -> str:
    part = (config.get("text_config") or {}).get("model_type")
    served = part in OWN_DECODERS or part in THROUGH_TRANSFORMERS
    remedy = f": use a checkpoint of its text part alone, of model_type {part}" if served else ""
    obstacle = f"octavo reads pictures of {', '.join(PICTURES)} alone, and no sound beside text"
    return f"{kind} is made for images or sound beside text, and {obstacle}{remedy}"


OWN_DECODERS: dict[str, str] = dict.fromkeys((*LLAMA_LIKE, *quantization.MIXTURES), "llama") | dict.fromkeys(
    FAMILIES, "gpt"
)
THROUGH_TRANSFORMERS = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "biogpt", "bitnet", "cohere", "cohere2"),
    *("cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "dbrx", "ernie4_5"),
    *("ernie4_5_moe", "flex_olmo", "flint", "fuyu", "gemma3n_text", "gemma4_text", "gemma4_unified_text"),
    *("glm", "glm4", "gpt_bigcode", "gpt_neox", "granite_swa", "granitemoe"),
    *("granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "jais2"),
    *("jetmoe", "kolibri1", "laguna", "longcat_flash", "mellum", "ministral", "ministral3"),
    *("modernbert-decoder", "moshi", "nanochat", "nemotron", "olmo", "opt", "persimmon", "phi"),
    *("phi4_multimodal", "phimoe", "seed_oss", "stablelm", "starcoder2", "vaultgemma"),
    *STATEFUL,
)
