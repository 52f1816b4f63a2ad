"""How a GPT-like decoder is divided between the ranks of a group: as one of Llama's family is (llama_share)."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from gpu_worker.models.decoders.gpt import GptConfig
from gpu_worker.models.decoders.ranks.place import RankPlace, ShareSpan, cut_rows, refuse_small
from gpu_worker.ops.native_cpu import MAX_HEAD_DIM
from octavo.request.errors import InvalidArgument

UNIT = 16  # rows
HEAD_UNIT = 8  # numbers, which fill a register


@dataclass(frozen=True, slots=True)
class GptShare:
    kv_heads: ShareSpan
    hidden: ShareSpan
    inner: ShareSpan
    vocab: ShareSpan
    layers: ShareSpan

    @classmethod
    def of(cls, config: GptConfig, place: RankPlace) -> Self:
        """InvalidArgument if some rank would have no rows, or no layers, and for heads that cannot be."""
        if config.head_dim % HEAD_UNIT or config.head_dim > MAX_HEAD_DIM:
            what = f"heads of {config.head_dim} numbers, which are no multiple of {HEAD_UNIT} up to {MAX_HEAD_DIM}"
            raise InvalidArgument("tensor_parallel", f"{what}, are computed by other ops, all at once: leave it out")
        size = place.ranks_of_stage
        stage, rank = divmod(place.rank, size)
        share = cls(
            kv_heads=ShareSpan.of(config.num_kv_heads, rank, size),
            hidden=ShareSpan.of(config.hidden_size, rank, size, UNIT),
            inner=ShareSpan.of(config.intermediate_size, rank, size, UNIT),
            vocab=ShareSpan.of(config.vocab_size, place.rank, place.size, UNIT),
            layers=ShareSpan.of(config.num_layers, stage, place.stages),
        )
        refuse_small(place, config.num_layers, share.layers, (share.hidden, share.inner, share.vocab))
        return share

    def queries(self, config: GptConfig) -> ShareSpan:
        """The own columns of what all heads attend to."""
        dim = config.head_dim * (config.num_heads // config.num_kv_heads)
        return ShareSpan(self.kv_heads.first * dim, self.kv_heads.num * dim)

    def keys(self, config: GptConfig) -> ShareSpan:
        return ShareSpan(self.kv_heads.first * config.head_dim, self.kv_heads.num * config.head_dim)

    def columns(self, config: GptConfig) -> dict[str, ShareSpan]:
        """The own columns of what ranks compute together, by the names of GptTeam."""
        queries = self.queries(config)
        return {
            "attended": queries,
            "q_norm": queries,
            "k_norm": self.keys(config),
            "out": self.hidden,
            "inner": self.inner,
            "down": self.hidden,
            "logits": self.vocab,
        }

    def cut(self, tensors: dict[str, Tensor], config: GptConfig) -> dict[str, Tensor]:
        """The own rows of a decoder's tensors, of the own layers. `tensors` loses them, so that they take no room."""
        hidden, queries, keys = config.hidden_size, self.queries(config), self.keys(config)
        key_rows = config.num_kv_heads * config.head_dim
        rows = {
            "qkv": [
                queries,
                ShareSpan(hidden + keys.first, keys.num),
                ShareSpan(hidden + key_rows + keys.first, keys.num),
            ],
            "out": [self.hidden],
            "up": [self.inner],
            "down": [self.hidden],
            "head": [self.vocab],
        }
        cut = {}
        for name in list(tensors):
            tensor = tensors.pop(name)
            layer, dot, rest = name.rpartition(".")
            if dot and not 0 <= int(layer) - self.layers.first < self.layers.num:
                continue
            spans = rows.get(rest.removesuffix("_bias"))
            if spans is not None:
                tensor = cut_rows(tensor, spans).clone()
            cut[name] = tensor
        if "head" not in cut:
            cut["head"] = cut_rows(cut["embedding"], [self.vocab])
        return cut
