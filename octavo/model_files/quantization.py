"""Which quantized safetensors checkpoints octavo reads, as far as `quantization_config` of config.json tells.

The command line asks it without loading torch. Every answer names the field, so that nobody has to guess which of the
many settings of these formats is the one that octavo does not read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

REMEDY = "use a checkpoint that is not quantized, or a GGUF file"
MXFP4 = "mxfp4"  # how gpt-oss is published; no other model is read in it
LLAMA_LIKE = (  # model types whose quantized files are multiplied as they are, beside those of MIXTURES
    *("llama", "exaone4", "gemma", "gemma2", "gemma3_text", "granite", "internlm3", "iquestcoder", "minicpm3"),
    *("mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3", "youtu"),
)
MIXTURES = (  # whose experts the extension multiplies, too
    *("deepseek_v2", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "gpt_oss", "hy_v3"),
    *("kimi_k2", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open"),
)
CODED = (*LLAMA_LIKE, *(name for name in MIXTURES if name != "gpt_oss"))  # whose files may be in codes or fp8
LIKE_GPT = ("bloom", "codegen", "falcon", "gpt2", "gpt-sw3", "gpt_neo", "gptj", "mpt")  # octavo's decoder of GPT
# Models of text with an encoder and a decoder: gpu_worker/models/through_transformers/encoder_decoder.py.
ENCODED = ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "mt5", "pegasus", "plbart", "t5", "umt5")
SPEECH = ("whisper",)  # their encoder reads speech: gpu_worker/models/through_transformers/speech_decoder.py
PICTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # gpu_worker/models/loading/picture_models.py
# Whose files are read neither in codes nor in fp8, as those of models that run through Transformers are.
WITHOUT_CODES = (*LIKE_GPT, *ENCODED, *SPEECH, *PICTURES, "gpt_oss")
# Models that read pictures whose text octavo's own decoder computes on a CPU, and as what. Their encoders stay floats.
PICTURED = {"qwen2_5_vl": "qwen2", "qwen2_vl": "qwen2", "qwen3_vl": "qwen3"}
GPTQ_FORMATS = ("gptq", "gptq_v2")  # where zero points are stored minus one, and where they are stored as they are
INTEGER_FORMATS = ("pack-quantized", "int-quantized")
BLOCK = 32  # columns that share a scale in the extension's blocks
STRATEGIES = ("tensor", "channel", "group")


def find_obstacle(config: Mapping[str, Any]) -> str:
    """Why the quantization that config.json tells of cannot be read; empty if octavo reads it, or if there is none."""
    content = config.get("quantization_config")
    if content is None:
        return ""
    if not isinstance(content, Mapping):
        return f"quantization_config is no object; {REMEDY}"
    method = content.get("quant_method")
    obstacles = {"fp8": lambda _: "", "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
    if is_mxfp4(config):
        return ""
    if not isinstance(method, str) or method not in obstacles:
        return f"weights quantized by {method!r} (quantization_config) are not read; {REMEDY}"
    obstacle = obstacles[method](content)
    if obstacle:
        return f"quantization_config of {method}: {obstacle}; {REMEDY}"
    if config.get("model_type") not in WITHOUT_CODES:
        return ""
    return f"weights so quantized are not read of {config.get('model_type')}; {REMEDY}"


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether this is gpt-oss as it is published."""
    content = config.get("quantization_config")
    is_said = isinstance(content, Mapping) and content.get("quant_method") == MXFP4
    return is_said and config.get("model_type") == "gpt_oss"


def describe(config: Mapping[str, Any]) -> str:
    """How a quantized checkpoint without an obstacle runs, for people; empty if it is not quantized."""
    content = config.get("quantization_config")
    if content is None:
        return ""
    method = str(content["quant_method"])
    if method == MXFP4:
        return f"{method} of the experts: on a CPU kept in 4 bits, on a GPU decoded to the model's dtype"
    if not has_integers(content):
        return f"{method} in 8-bit floats: decoded to the model's dtype"
    bits = sorted(bits_of(content))
    what = f"{method} in {' and '.join(map(str, bits))} bits"
    if is_reordered(content):
        return f"{what}, in the order of activations: decoded to the model's dtype"
    if has_odd_groups(content):
        return f"{what}, in groups that are not whole blocks of {BLOCK} columns: decoded to the model's dtype"
    return f"{what}: on a CPU {_kept(content, bits)}, on a GPU decoded to the model's dtype"


def has_integers(content: Mapping[str, Any]) -> bool:
    """Whether the weights are whole numbers with scales. `content` is a quantization_config without an obstacle."""
    groups = _groups(content)
    return content["quant_method"] in ("awq", "gptq") or any(each["weights"].get("type") == "int" for each in groups)


def rounds_inputs(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint says that products round their inputs to whole numbers of 8 bits, with a scale for each
    token, as every reader of it does (W8A8 of compressed-tensors). `config` is config.json without an obstacle."""
    content = config.get("quantization_config")
    groups = _groups(content) if content is not None else []
    return bool(groups) and all(map(_rounds_inputs, groups))


def _rounds_inputs(group: Mapping[str, Any]) -> bool:
    inputs = group.get("input_activations") or {}
    said = [inputs.get(name) for name in ("type", "num_bits", "strategy", "dynamic")]
    return said == ["int", 8, "token", True] and inputs.get("symmetric", True) is True


def has_zeros(content: Mapping[str, Any]) -> bool:
    """Whether codes have zero points beside the middle."""
    is_awq = content["quant_method"] == "awq"
    unsymmetric = any(not each["weights"].get("symmetric", True) for each in _groups(content))
    return is_awq or content.get("sym") is False or unsymmetric


def is_reordered(content: Mapping[str, Any]) -> bool:
    """Whether columns that share a scale may lie apart (act-order)."""
    orders = (each["weights"].get("actorder") for each in _groups(content))
    return bool(content.get("desc_act")) or any(str(order).lower() in ("group", "true") for order in orders)


def has_odd_groups(content: Mapping[str, Any]) -> bool:
    """Whether neighbours in a block that the extension multiplies may have several scales."""
    sizes = [each["weights"].get("group_size") for each in _groups(content)] or [content.get("group_size", 128)]
    return any(type(size) is int and size > 0 and size % BLOCK != 0 for size in sizes)


def _kept(content: Mapping[str, Any], bits: Sequence[int]) -> str:
    """How the extension keeps codes: it has zero points for those of 4 bits alone."""
    decoded = 8 in bits and has_zeros(content)
    kept = [str(each) for each in bits if each == 4 or not decoded]
    parts = [f"kept in {' and '.join(kept)} bits"] if kept else []
    return " and ".join([*parts, "decoded to the model's dtype (8 bits)"] if decoded else parts)


def bits_of(content: Mapping[str, Any]) -> set[int]:
    """Of codes."""
    return {each["weights"]["num_bits"] for each in _groups(content)} or {content.get("bits", 4)}


def _awq(content: Mapping[str, Any]) -> str:
    version = str(content.get("version") or content.get("format") or "gemm").lower()
    if content.get("bits", 4) != 4:
        return f"bits is {content['bits']!r}, and 4 are read"
    if version != "gemm" or content.get("backend") == "llm-awq":
        return f"version is {version!r} (backend {content.get('backend')!r}), and only 'gemm' of AutoAWQ is read"
    if content.get("zero_point", True) is not True:
        return "zero_point is not true, and no such file says what its zeros are"
    return _group_size(content)


def _gptq(content: Mapping[str, Any]) -> str:
    kind = str(content.get("checkpoint_format") or content.get("format") or "gptq").lower()
    if content.get("bits", 4) not in (4, 8):
        return f"bits is {content['bits']!r}, and 4 and 8 are read"
    if kind not in GPTQ_FORMATS or content.get("is_marlin_format"):
        shown = "marlin (is_marlin_format)" if content.get("is_marlin_format") else kind
        return f"checkpoint_format is {shown!r}, and {' and '.join(GPTQ_FORMATS)} are read"
    if content.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        return f"pack_dtype is {content['pack_dtype']!r}, and only int32 is read"
    dynamic = content.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or any(not str(name).startswith("-:") for name in dynamic):
        return "dynamic gives some modules settings of their own, which are not read (modules left out are)"
    return _group_size(content)


def _group_size(content: Mapping[str, Any]) -> str:
    size = content.get("group_size", 128)
    return "" if type(size) is int and (size == -1 or size >= 1) else f"group_size is {size!r}, no number of columns"


def _compressed(content: Mapping[str, Any]) -> str:
    """Why a checkpoint of compressed-tensors is not read. Formats of groups may differ, kinds of numbers may not."""
    groups = content.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(map(_is_spelled_out, groups.values())):
        return "config_groups does not say of each group how its weights are stored"
    kinds = [(each["weights"].get("type"), each["weights"].get("num_bits")) for each in groups.values()]
    sparse = content.get("sparsity_config")
    if sparse and (not isinstance(sparse, Mapping) or sparse.get("format", "dense") != "dense"):
        return f"sparsity_config: {sparse!r} leaves out weights, which is not read"
    if content.get("transform_config"):
        return "transform_config turns inputs, which octavo does not do"
    if all(kind == ("float", 8) for kind in kinds):
        return ""
    if not all(kind in (("int", 4), ("int", 8)) for kind in kinds):
        listed = ", ".join(sorted({f"{bits} bits of {kind}" for kind, bits in kinds}))
        return f"config_groups has {listed}; read are 4 or 8 bits of int, or 8 bits of float"
    if content.get("kv_cache_scheme") is not None:
        return "kv_cache_scheme quantizes keys and values, which only --kv-cache-dtype does here"
    if content.get("quantization_status", "compressed") != "compressed":
        return f"quantization_status is {content['quantization_status']!r}, and only 'compressed' is read"
    return next(filter(None, (_group_obstacle(name, each, content) for name, each in groups.items())), "")


def _is_spelled_out(group: object) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)


def _group_obstacle(name: str, group: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    stored = group.get("format") or content.get("format")
    weights, inputs = group["weights"], group.get("input_activations")
    if stored not in INTEGER_FORMATS:
        return f"format is {stored!r}, and {' and '.join(INTEGER_FORMATS)} are read"
    if weights.get("strategy") not in STRATEGIES:
        return f"{name}.weights.strategy is {weights.get('strategy')!r}, and {', '.join(STRATEGIES)} are read"
    size = weights.get("group_size")
    if weights["strategy"] == "group" and (type(size) is not int or size < 1):
        return f"{name}.weights.group_size is {size!r}, no number of columns"
    if weights.get("dynamic"):
        return f"{name}.weights.dynamic is set, but weights in a file have scales"
    if inputs is not None and not (isinstance(inputs, Mapping) and inputs.get("dynamic") is True):
        return (
            f"{name}.input_activations has static scales (dynamic is not true), which octavo does not round inputs by"
        )
    if group.get("output_activations") is not None:
        return f"{name}.output_activations is set, and octavo does not round outputs"
    return ""


def _groups(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The groups of modules of compressed-tensors; none if another method wrote the file."""
    return list(content["config_groups"].values()) if content.get("quant_method") == "compressed-tensors" else []
