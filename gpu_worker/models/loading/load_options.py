"""What the loading of a model has been asked for, and what of it a model or the machine cannot do."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gpu_worker.models.checkpoint.kv_scales import digest_of
from gpu_worker.models.checkpoint.weights import ProgressCallback
from gpu_worker.models.decoders import llama, native_llama
from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.models.decoders.native_llama import NativeLlamaDecoder
from gpu_worker.models.decoders.ranks.device_share import LlamaDeviceShare
from gpu_worker.models.decoders.ranks.place import RankPlace
from gpu_worker.models.packed.packed_cache import PackedCache
from gpu_worker.models.packed.packed_weights import A8, weights_of
from gpu_worker.ops import Ops
from gpu_worker.ops.native_cpu import NativeCpuOps
from gpu_worker.ops.native_cuda import NativeCudaOps
from octavo.request.errors import InvalidArgument

log = logging.getLogger(__name__)
KEPT = "kept"  # of quantization: matrices in 4 bits and fp8 stay so on a GPU
KEPT_SCHEMES = (KEPT, f"{KEPT}{A8}")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    device: torch.device
    dtype: torch.dtype | None
    ops: Ops
    quantization: str
    fp8_cache: bool
    context_tokens: int | None
    cache_dir: Path | None
    packed_cache: PackedCache | None
    place: RankPlace | None
    recommended: bool
    progress: ProgressCallback
    kv_scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # of the checkpoint, for an fp8 cache

    says_8_bits: bool = False  # the checkpoint means inputs in 8 bits, with a scale for each token

    @property
    def scheme(self) -> str:
        """What `auto` means, or what was asked for."""
        return f"auto{A8}" if self.quantization == "auto" and self.says_8_bits else self.quantization

    @property
    def keeps(self) -> bool:
        return self.quantization in KEPT_SCHEMES

    @property
    def rounds(self) -> bool:
        """Whether weights are to be rounded that the files have otherwise."""
        return weights_of(self.quantization) in ("q8", "q4")

    def packs_layers(self) -> bool:
        """Whether the extension multiplies layers of a model that runs through Transformers.

        InvalidArgument if not, but a rounding was asked for, or a group.
        """
        if self.place is None and not self.keeps and self.device.type == "cpu" and isinstance(self.ops, NativeCpuOps):
            return True
        self.native(None)
        return False

    def native(self, config: LlamaConfig | None) -> bool:
        """Whether the extension runs this model in one call, on a CPU. InvalidArgument if it does not, but a rounding
        was asked for; or if weights are to be kept, and the model or the ops cannot."""
        if config is not None and config.latent is not None:
            self._refuse_for_latents()
        if self.place is not None and self.place.has_device:
            self._refuse_on_devices(config)
            return False
        if self.keeps and config is not None and isinstance(self.ops, NativeCudaOps) and self.place is None:
            return False
        on_cpu = isinstance(self.ops, NativeCpuOps) and config is not None
        obstacle = native_llama.find_obstacle(config) if config is not None and on_cpu else ""
        if on_cpu and not obstacle and not self.keeps:
            return True
        if self.place is not None:
            raise InvalidArgument(
                "tensor_parallel",
                "a group runs models like Llama, by the extension on a CPU, and like GPT alone: leave it out",
            )
        self.refuse_packed(obstacle)
        return False

    def _refuse_for_latents(self) -> None:
        if self.place is not None:
            raise InvalidArgument("tensor_parallel", "a group divides no latent attention (MLA): leave it out")
        if self.keeps:
            raise InvalidArgument("quantization", "kept keeps no matrices of latent attention (MLA): say auto")

    def _refuse_on_devices(self, config: LlamaConfig | None) -> None:
        if config is None:
            reason = "GPUs divide models like Llama and like GPT alone: leave it out"
            raise InvalidArgument("tensor_parallel", reason)
        if self.keeps:
            raise InvalidArgument("quantization", "kept weights are not divided between GPUs: say auto")
        self.refuse_packed()

    def device_share(self, config: LlamaConfig) -> LlamaDeviceShare | None:
        """Of a rank with a device of its own."""
        if self.place is None or not self.place.has_device:
            return None
        return LlamaDeviceShare.of(config, self.place)

    def refuse_packed(self, obstacle: str = "") -> None:
        """`obstacle`: why a model that would run by the extension does not."""
        if self.keeps:
            reason = "kept needs the CUDA kernels on a GPU and a Llama-like model: say auto"
            raise InvalidArgument("quantization", reason)
        if self.quantization not in ("auto", "none") and obstacle:
            reason = f"{self.quantization} does not round this model, as its {obstacle}: say auto or none"
            raise InvalidArgument("quantization", reason)
        if self.quantization not in ("auto", "none"):
            raise InvalidArgument(
                "quantization",
                f"{self.quantization} needs native ops on a CPU, and no model like GPT, nor a mixture with pictures",
            )

    def variant(self, decoder: Decoder, packed: bool) -> str:
        """Why this decoder's tokens differ from those of other decoders of the same files; empty if they do not."""
        weights = weights_of(self.quantization)
        rounded = weights in ("q8", "q4") or (weights == "auto" and packed)
        packs = isinstance(decoder, NativeLlamaDecoder) or getattr(decoder, "packed", None) is not None
        rounds = (rounded and packs) or self.quantization == f"{KEPT}{A8}"
        variant = self.scheme if rounds else ""
        if isinstance(decoder, (NativeLlamaDecoder, llama.LlamaDecoder)) and decoder.config.rope.kind == "longrope":
            is_long = decoder.config.rope.is_long(decoder.context_tokens)
            log.info("positions are those for %s sequences (--context-tokens decides)", "long" if is_long else "short")
            variant += " long" if is_long else " short"
        return variant + (f" kv-scales {digest_of(self.kv_scales)}" if self.kv_scales else "")


def without_8_bits(how: LoadOptions) -> InvalidArgument:
    remedy = "say q8-a8 or q4-a8, or leave -a8 out" if weights_of(how.quantization) == "auto" else "leave -a8 out"
    reason = f"inputs are rounded for matrices of 3 to 8 bits alone, and no layer has one here: {remedy}"
    return InvalidArgument("quantization", f"{how.quantization}: {reason}")
