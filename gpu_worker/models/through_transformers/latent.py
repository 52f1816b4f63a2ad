"""Latent attention (MLA): pages hold one compressed vector for each token and layer, however many heads there are.

Transformers' code expands the vector (latent and rotated key) into keys and values, by one matrix for each head.
Here the matrix of keys is multiplied with the query instead, and that of values with what attention gives. So the
compressed vector is key and value at once, of one head that all heads of the query share.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn


class LatentLayer:
    """What a module with latent attention does to queries before attention, and to what comes out of it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = cast("Any", module)

    def key(self, latent: Tensor, rotated: Tensor) -> Tensor:
        """[num_tokens, 1, rank] and [num_tokens, 1, rotated] as one vector. It is the value, too."""
        return torch.cat((latent, rotated), dim=-1)

    def query(self, queries: Tensor) -> Tensor:
        """[num_tokens, num_heads, dims of a key] as the head of the pages is asked."""
        plain, rotated = queries.split((self._module.qk_nope_head_dim, self._module.qk_rope_head_dim), dim=-1)
        return torch.cat((torch.einsum("thd,hdr->thr", plain, self._expansion()[0]), rotated), dim=-1)

    def values(self, attended: Tensor) -> Tensor:
        """[num_tokens, num_heads, rank + rotated] as the module gets it."""
        rank = self._module.kv_lora_rank
        return torch.einsum("thr,hdr->thd", attended[..., :rank], self._expansion()[1])

    def _expansion(self) -> tuple[Tensor, Tensor]:
        """The matrices [num_heads, dims, rank] that make keys and values of a latent."""
        dims = self._module.qk_nope_head_dim, self._module.v_head_dim
        keys, values = self._module.kv_b_proj.weight.unflatten(0, (-1, sum(dims))).split(dims, dim=1)
        return keys, values


def layer_of(module: nn.Module) -> LatentLayer | None:
    """None: its attention has keys and values of its own. Latents come as they are within `compressed`."""
    return vars(module).get("octavo_latent")


@contextmanager
def compressed(model: nn.Module) -> Iterator[None]:
    """Within this, modules with latent attention give the attention function the latent and the rotated key."""
    latent = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    for module in latent:
        vars(module).update(expand_kv=lambda latent, rotated: (latent, rotated), octavo_latent=LatentLayer(module))
    try:
        yield
    finally:
        for module in latent:
            del vars(module)["expand_kv"], vars(module)["octavo_latent"]
