"""Tiny random models of every kind that is served, by a name: how each is made, and how it is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import transformers
from code_checkpoints import FORMS, write_codes, write_fp8, write_mxfp4
from gguf_converter import convert
from gguf_models import MIXTURES as K_MIXTURES
from gguf_models import q4_k_m, write_gguf
from loras import write_gguf_lora, write_lora
from random_models import random_model, save_random
from transformers_types import DENSE, LATENTS, MIXTURES, SMALL, TYPES

WIDE = {**SMALL, "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 256}  # rows of whole K blocks
LLAMA = ("Llama", WIDE)
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
STATES = ("falcon_h1", "qwen3_next")
GGUF_MODELS = {  # as llama.cpp's files of them can have them
    **{name: MIXTURES[name] for name in ("mixtral", "qwen2_moe")},
    **{name: DENSE[name] for name in ("gemma3", "olmo2", "granite", "exaone4")},
    "qwen3_moe": ("Qwen3Moe", {**MIXTURES["qwen3_moe"][1], "norm_topk_prob": True}),
    "gpt_oss": ("GptOss", {**MIXTURES["gpt_oss"][1], "swiglu_limit": 7.0}),
    "ernie4_5": TYPES["ernie4_5"],
    "deepseek_v2": ("DeepseekV2", {**LATENTS["deepseek_v2"][1], "q_lora_rank": None, "qk_nope_head_dim": 32}),
}
Model = tuple[str, dict[str, Any]]  # the class of the configuration, without "Config", and its fields


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A kind of model. `write` makes one in an empty folder, and says what is loaded."""

    write: Callable[[Path], Path]
    numbers: str = ""  # what the name of its decoder says of them
    options: Mapping[str, Any] = field(default_factory=dict)
    same_bits: bool = True  # in a piece of any size, as docs/promises.md says
    adapter: str = ""  # the file of a low-rank adapter, beside the model


def saved(model: Model, folder: Path) -> Path:
    kind, fields = model
    return save_random(getattr(transformers, f"{kind}Config")(**fields), folder / "model")


def plain(model: Model) -> Callable[[Path], Path]:
    return lambda folder: saved(model, folder)


def in_codes(form: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_codes(saved(LLAMA, folder), folder / form, FORMS[form])
        return folder / form

    return write


def in_fp8(folder: Path) -> Path:
    write_fp8(saved(LLAMA, folder), folder / "fp8", (1, 0), CHANNELS, "_scale")
    return folder / "fp8"


def in_mxfp4(folder: Path) -> Path:
    write_mxfp4(saved(MIXTURES["gpt_oss"], folder), folder / "mxfp4")
    return folder / "mxfp4"


def in_gguf(kinds: Any, in_part: int = 0) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "gguf").mkdir()
        write_gguf(saved(LLAMA, folder), folder / "gguf/model.gguf", kinds, in_part=in_part)
        return min((folder / "gguf").iterdir())

    return write


def converted(name: str, kind: str = "Q8_0") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        convert(saved(GGUF_MODELS[name], folder), folder / "model.gguf", kind=gguf.GGMLQuantizationType[kind])
        return folder / "model.gguf"

    return write


def with_adapter(folder: Path) -> Path:
    config = transformers.LlamaConfig(**SMALL)
    model = random_model(config, seed=1)
    model.save_pretrained(folder / "model")
    adapter = write_lora(folder / "lora", model, seed=2)
    write_gguf_lora(folder / "model/lora.gguf", adapter, "llama", (SMALL["num_attention_heads"], 2))
    return folder / "model"


COARSE = {"quantization": "auto-a8"}
KINDS: dict[str, ModelKind] = {
    **{
        f"gguf {formats.replace('+', ' ') or 'of all types'}": ModelKind(in_gguf(kinds), formats.replace("+", ", "))
        for kinds, formats in K_MIXTURES
    },
    "gguf q4_k q6_k, inputs in 8 bits": ModelKind(in_gguf(q4_k_m), "q4_k, q6_k; inputs 8 bits", COARSE),
    "gguf in parts": ModelKind(in_gguf("Q8_0", in_part=8), "q8"),
    **{form: ModelKind(in_codes(form)) for form in ("gptq", "gptq-act-order", "packed", "packed-8")},
    "awq": ModelKind(in_codes("awq"), "q4_zeros"),
    "int8": ModelKind(in_codes("int8"), "q8_rows"),
    "fp8": ModelKind(in_fp8),
    "mxfp4": ModelKind(in_mxfp4, "mxfp4"),
    "gguf gpt_oss mxfp4": ModelKind(converted("gpt_oss", "MXFP4"), "mxfp4"),
    "adapter": ModelKind(with_adapter, adapter="lora.gguf"),
    **{
        name: ModelKind(plain(MIXTURES[name]))
        for name in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "gpt_oss")
    },
    **{name: ModelKind(plain(LATENTS[name])) for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")},
    **{f"gguf {name}": ModelKind(converted(name)) for name in GGUF_MODELS if name != "gpt_oss"},
    **{
        name: ModelKind(plain(TYPES[name]), same_bits=False)
        for name in ("glm4", "starcoder2-unwindowed", "stablelm", "cohere2", *STATES)
    },
}
