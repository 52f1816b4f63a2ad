"""How GGUF files of Gemma 1 to 3 become models of Transformers."""

from collections.abc import Mapping

from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.positions import near_positions, rope_parameters
from gpu_worker.models.gguf.recipes import LLAMA, NORMED_OUTPUTS, Family, Reader, gemma_norms, named_recipes
from gpu_worker.models.gguf.settings import common, rms

# The only Gemma 2 and 3 whose scores are not divided by the root of a head's size.
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
GEMMA = LLAMA | NORMED_OUTPUTS | {"ffn_norm": "pre_feedforward_layernorm"}


def _read_gemma(header: GgufHeader) -> Family:
    config = common(header, "gemma", **rms(header), intermediate_size=header.inner_size())
    return Family(config, named_recipes(header, LLAMA, gemma_norms(LLAMA)))


def _read_gemma2(header: GgufHeader) -> Family:
    """Where a file is silent, it is a published model."""
    config = common(header, "gemma2", **rms(header), intermediate_size=header.inner_size()) | {
        "query_pre_attn_scalar": _score_size(header, GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": header.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.number("final_logit_softcapping", 30.0),
        "sliding_window": header.integer("attention.sliding_window", 4096),
        "layer_types": header.layer_types(1, 2),
    }
    return Family(config, named_recipes(header, GEMMA, gemma_norms(GEMMA)))


def _score_size(header: GgufHeader, layers_of_27b: int) -> int:
    return header.hidden // header.heads if header.layers == layers_of_27b else header.head_dim


def _read_gemma3(header: GgufHeader) -> Family:
    window = header.integer("attention.sliding_window", 0)
    config = common(header, "gemma3_text", **rms(header), intermediate_size=header.inner_size()) | {
        "query_pre_attn_scalar": _score_size(header, GEMMA3_27B_LAYERS),
        "sliding_window": window or header.context,
        "layer_types": header.layer_types(window, 6),
        "rope_parameters": {"full_attention": rope_parameters(header), "sliding_attention": near_positions(header)},
        "final_logit_softcapping": header.number("final_logit_softcapping", 0.0) or None,
        "attn_logit_softcapping": None,
    }
    return Family(config, named_recipes(header, GEMMA, gemma_norms(GEMMA)))


READERS: Mapping[str, Reader] = {
    "gemma": _read_gemma,
    "gemma2": _read_gemma2,
    "gemma3": _read_gemma3,
}
