"""Checkpoints of models with latent attention, with their matrices as decoders multiply them.

A checkpoint makes keys and values of a latent by one matrix, `kv_b_proj`, a head after the other. Decoders multiply the
matrices of keys with queries, and those of values with what attention gives: so there are two, `k_b_proj` and
`v_b_proj`, and each head's keys lie the other way round. What is rotated of queries and keys comes first, and its
dimensions turn with those half of them away.
"""

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import FLOATS, BlockSource, WeightSource
from gpu_worker.models.decoders.latent.latent_config import LatentConfig
from octavo.request.errors import BadModel

WHOLE, KEYS, VALUES = (f".self_attn.{name}_b_proj.weight" for name in ("kv", "k", "v"))
QUERIES, LATENTS = (".self_attn.q_proj.", ".self_attn.q_b_proj."), ".self_attn.kv_a_proj_with_mqa."


class LatentSource:
    """A source around one by the names of checkpoints; the halves of `kv_b_proj` may be there already."""

    def __init__(self, source: WeightSource, heads: int, sizes: LatentConfig) -> None:
        self._source = source
        self._heads = heads
        self._sizes = sizes
        stored = source.names()
        whole = {name.removesuffix(WHOLE) for name in stored if name.endswith(WHOLE)}
        self._divided = whole - {name.removesuffix(KEYS) for name in stored if name.endswith(KEYS)}
        self._names = stored - {f"{layer}{WHOLE}" for layer in whole}
        self._names |= {f"{layer}{half}" for layer in self._divided for half in (KEYS, VALUES)}
        # Of models whose latents have a bias, and whose queries are made of the states and have none.
        biased = {name.removesuffix(f"{LATENTS}bias") for name in stored if name.endswith(f"{LATENTS}bias")}
        self._zeros = {
            f"{layer}{QUERIES[0]}bias" for layer in biased if f"{layer}{QUERIES[0]}weight" in stored
        } - stored
        self._names |= self._zeros

    def names(self) -> set[str]:
        return set(self._names)

    def get(self, name: str) -> Tensor:
        if name in self._zeros:
            return torch.zeros(self._heads * self._sizes.query)
        whole, half = self._whole(name)
        if not half:
            return self._in_order(name, self._source.get(name))
        tensor = self._source.get(whole)
        self._check(whole, tuple(tensor.shape))
        dims = self._sizes.plain, self._sizes.values
        keys, values = tensor.view(self._heads, sum(dims), -1).split(dims, dim=1)
        found: Tensor = keys.transpose(1, 2) if half == KEYS else values
        return found.flatten(0, 1)

    def _check(self, whole: str, found: tuple[int, ...]) -> None:
        """BadModel unless a matrix with both halves has the shape that is taken apart."""
        wanted = self._heads * (self._sizes.plain + self._sizes.values), self._sizes.rank
        if found != wanted:
            raise BadModel(
                f"tensor {whole!r} is {found}, the configuration says {wanted} "
                "(num_attention_heads, qk_nope_head_dim, v_head_dim, kv_lora_rank)"
            )

    def _whole(self, name: str) -> tuple[str, str]:
        """The name of the matrix that this one is half of, and which; empty: it is none, or stored by itself."""
        for half in (KEYS, VALUES):
            if name.endswith(half) and (layer := name.removesuffix(half)) in self._divided:
                return f"{layer}{WHOLE}", half
        return "", ""

    def _in_order(self, name: str, tensor: Tensor) -> Tensor:
        """With its rows as decoders have them; a row may be a number, or blocks."""
        sizes, rotated = self._sizes, torch.arange(self._sizes.rotated)
        if self._sizes.interleaved:
            rotated = torch.cat((rotated[::2], rotated[1::2]))
        if any(part in name for part in QUERIES):
            order = torch.cat((rotated + sizes.plain, torch.arange(sizes.plain)))
        elif LATENTS in name:
            order = torch.cat((rotated + sizes.rank, torch.arange(sizes.rank)))
        else:
            return tensor
        if len(tensor) % len(order):
            return tensor  # whoever reads it says what it should be
        moved: Tensor = tensor.unflatten(0, (-1, len(order)))[:, order]
        return moved.flatten(0, 1)


class LatentBlockSource(LatentSource):
    """A BlockSource around one."""

    def __init__(self, source: BlockSource, heads: int, sizes: LatentConfig) -> None:
        super().__init__(source, heads, sizes)
        self._blocks = source

    def block_format(self, name: str) -> str:
        """Keys that lie the other way round are no blocks any more."""
        if name in self._zeros:
            return FLOATS
        whole, half = self._whole(name)
        found = self._blocks.block_format(whole or name)
        return found if found == FLOATS or half != KEYS else ""

    def shape(self, name: str) -> tuple[int, ...]:
        whole, half = self._whole(name)
        if not half:
            return self._blocks.shape(name)
        self._check(whole, self._blocks.shape(whole))
        if half == KEYS:
            return self._heads * self._sizes.rank, self._sizes.plain
        return self._heads * self._sizes.values, self._sizes.rank

    def blocks(self, name: str) -> Tensor:
        whole, half = self._whole(name)
        if not half:
            return self._in_order(name, self._blocks.blocks(name))
        self._check(whole, self._blocks.shape(whole))
        dims = self._sizes.plain, self._sizes.values
        heads: Tensor = self._blocks.blocks(whole).unflatten(0, (self._heads, sum(dims)))
        return heads[:, dims[0] :].flatten(0, 1)


def in_halves(source: WeightSource, heads: int, sizes: LatentConfig | None) -> WeightSource:
    """The source as a decoder of so many heads reads it; the same for one without latent attention."""
    if sizes is None:
        return source
    if isinstance(source, BlockSource):
        return LatentBlockSource(source, heads, sizes)
    return LatentSource(source, heads, sizes)
