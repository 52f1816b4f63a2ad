"""How GGUF files of models with recurrent layers become models of Transformers."""

from collections.abc import Callable, Mapping

from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.recipes import Family
from gpu_worker.models.gguf.recurrent.convolutions import read_lfm2, read_lfm2moe
from gpu_worker.models.gguf.recurrent.delta_nets import read_qwen3next, read_qwen35, read_qwen35moe
from gpu_worker.models.gguf.recurrent.kimi import read_kimi_linear
from gpu_worker.models.gguf.recurrent.mamba import (
    read_falcon_h1,
    read_granitehybrid,
    read_jamba,
    read_mamba,
    read_mamba2,
)
from gpu_worker.models.gguf.recurrent.nemotron import read_nemotron_h

RECURRENT: Mapping[str, Callable[[GgufHeader], Family]] = {
    "falcon-h1": read_falcon_h1,
    "granitehybrid": read_granitehybrid,
    "jamba": read_jamba,
    "kimi-linear": read_kimi_linear,
    "lfm2": read_lfm2,
    "lfm2moe": read_lfm2moe,
    "mamba": read_mamba,
    "mamba2": read_mamba2,
    "nemotron_h": read_nemotron_h,
    "nemotron_h_moe": read_nemotron_h,
    "qwen35": read_qwen35,
    "qwen35moe": read_qwen35moe,
    "qwen3next": read_qwen3next,
}
