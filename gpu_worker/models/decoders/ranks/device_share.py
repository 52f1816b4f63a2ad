"""How a decoder whose steps are called op by op is divided between ranks with a device each.

Shares are those of ranks that share memory (llama_share, gpt_share). But a rank holds its rows alone, on its device,
and keeps the keys and values of its own heads there: each rank needs one at least.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.decoders.experts import PLACES, SHARED, StackTensors
from gpu_worker.models.decoders.gpt import GptConfig
from gpu_worker.models.decoders.llama import FIRST_SOURCES, FUSED_SOURCES
from gpu_worker.models.decoders.ranks.device_team import DeviceTeam
from gpu_worker.models.decoders.ranks.gpt_share import GptShare
from gpu_worker.models.decoders.ranks.llama_share import LlamaShare, stack_of
from gpu_worker.models.decoders.ranks.place import RankPlace, ShareSpan, cut_rows
from octavo.request.errors import InvalidArgument

# Our names of a layer's matrices, by the first tensor in checkpoints that each is made of.
STEMS = {source: name for sources in (FIRST_SOURCES, FUSED_SOURCES) for name, source in sources.items()}
FIRST_OF_EXPERTS = tuple(f".{gate}" for gate, _, _ in PLACES.values())
Columns = Mapping[str, Sequence[ShareSpan]]  # of each rank, by name


@dataclass(frozen=True, slots=True)
class LlamaDeviceShare:
    place: RankPlace
    columns: Columns
    rows: Mapping[str, Sequence[ShareSpan]]  # the own ones of each matrix, by our names
    context_tokens: int

    @classmethod
    def of(cls, config: LlamaConfig, place: RankPlace) -> Self:
        """InvalidArgument if this model is not divided between GPUs, or not between so many."""
        if any(config.sparse) or config.sinks or (config.experts is not None and config.experts.biased):
            what = "block-sparse attention, sinks and experts with biases"
            raise InvalidArgument("tensor_parallel", f"{what} are not divided between GPUs: leave it out")
        shares = [LlamaShare.of(config, replace(place, rank=rank)) for rank in range(place.size)]
        heads = [share.kv_heads for share in shares]
        refuse_headless(config.num_kv_heads, heads)
        dim = config.head_dim
        keys = [ShareSpan(span.first * dim, span.num * dim) for span in heads]
        group = config.num_heads // config.num_kv_heads
        queries = [ShareSpan(span.first * group, span.num * group) for span in keys]
        columns = {
            "kv_heads": heads,
            "attended": queries,
            "q_norm": queries,
            "k_norm": keys,
            "out": [share.hidden for share in shares],
            **{name: [getattr(share, name) for share in shares] for name in ("inner", "expert_inner", "shared_inner")},
            "down": [share.hidden for share in shares],
            "logits": [share.vocab for share in shares],
        }
        return cls(place, columns, shares[place.rank].rows(config), config.context_tokens)

    def team(self, device: torch.device) -> DeviceTeam:
        return DeviceTeam(self.place, device, self.columns, self.context_tokens)

    def cutting(self, read: StackTensors[Tensor], device: torch.device) -> StackTensors[Tensor]:
        """Reads matrices, and keeps the own rows alone, on the device."""

        def matrix(names: list[str], shapes: list[tuple[int, ...]]) -> Tensor:
            return self._own(_stem_of(names[0]), read(names, shapes)).to(device)

        return matrix

    def finished(self, tensors: Mapping[str, Tensor], *, is_cut: bool) -> dict[str, Tensor]:
        """The decoder's tensors, of biases and, unless they are cut already, of matrices the own rows."""
        finished = {}
        for name, tensor in tensors.items():
            stem = stack_of(name)[1]
            bias = stem.endswith("_bias")
            finished[name] = self._own(stem.removesuffix("_bias"), tensor) if bias or not is_cut else tensor
        if "head" not in finished:
            finished["head"] = self._own("head", tensors["embedding"])
        return finished

    def _own(self, stem: str, tensor: Tensor) -> Tensor:
        return cut_rows(tensor, self.rows[stem]) if stem in self.rows else tensor


def gpt_team(config: GptConfig, place: RankPlace) -> Callable[[torch.device], DeviceTeam]:
    """What makes the team. InvalidArgument if this model is not divided between so many GPUs."""
    shares = [GptShare.of(config, replace(place, rank=rank)) for rank in range(place.size)]
    heads = [share.kv_heads for share in shares]
    refuse_headless(config.num_kv_heads, heads)
    own = [share.columns(config) for share in shares]
    columns = {"kv_heads": heads} | {name: [each[name] for each in own] for name in own[0]}
    return lambda device: DeviceTeam(place, device, columns, config.context_tokens)


def refuse_headless(num_kv_heads: int, heads: Sequence[ShareSpan]) -> None:
    if not all(span.num for span in heads):
        raise InvalidArgument(
            "tensor_parallel", f"a GPU keeps whole KV heads, of which this model has {num_kv_heads}: give no more ranks"
        )


def _stem_of(name: str) -> str:
    """Our name of a matrix, without its layer, by the first tensor in checkpoints that it is made of."""
    if name == "lm_head.weight":
        return "head"
    end = ".".join(name.removesuffix(".weight").split(".")[3:])  # without `model.layers.3`
    if ".experts." in end:
        return "expert_gate_up" if end.endswith(FIRST_OF_EXPERTS) else "expert_down"
    if end.startswith(tuple(f"{place}.{shared}." for place in PLACES for shared in SHARED)):
        return "shared_gate_up" if end.endswith(FIRST_OF_EXPERTS) else "shared_down"
    return STEMS.get(end, "")
