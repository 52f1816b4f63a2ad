"""Opens a directory of safetensors, whether its matrices are floats, fp8, MXFP4 or codes of 4 or 8 bits.

octavo.model_files.quantization says which of them are read.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from gpu_worker.models.checkpoint.code_layouts import AwqLayout, CodeLayout, CompressedLayout, GptqLayout
from gpu_worker.models.checkpoint.code_source import CodeSource
from gpu_worker.models.checkpoint.fp8_source import open_fp8
from gpu_worker.models.checkpoint.gpt_oss_source import GptOssSource
from gpu_worker.models.checkpoint.weights import WeightSource
from octavo.model_files.quantization import has_integers

LAYOUTS: Mapping[str, Callable[[Mapping[str, Any]], CodeLayout]] = {
    "awq": AwqLayout,
    "gptq": GptqLayout,
    "compressed-tensors": CompressedLayout,
}


def open_source(source: WeightSource, config: Mapping[str, Any]) -> WeightSource:
    """The tensors of a directory's files by their usual names. `config` is its config.json, which has no obstacle."""
    quantization = config.get("quantization_config")
    if config.get("model_type") == "gpt_oss":
        return GptOssSource(source, int(config.get("num_local_experts") or 0))
    if quantization is None:
        return source
    if has_integers(quantization):
        return CodeSource(source, LAYOUTS[quantization["quant_method"]](quantization))
    return open_fp8(source, quantization)


def decoded(source: WeightSource, left_out: Collection[str], own: Collection[str]) -> dict[str, Tensor]:
    """Its tensors as floats, but those that are left out, and biases of zeros, which some writers add to codes.

    A bias that the model has, by the names of its `own` tensors, is read whatever it is.
    """
    tensors = {name: source.get(name) for name in sorted(source.names() - set(left_out))}
    for name in source.coded_names() if isinstance(source, CodeSource) else ():
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias in tensors and bias not in own and not tensors[bias].any():
            del tensors[bias]
    return tensors
