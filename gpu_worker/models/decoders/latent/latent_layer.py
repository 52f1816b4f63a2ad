"""What latent attention makes of a layer's rows before attention, and of what attention gives, op by op.

`csrc/cpu/llama_latent.cpp` computes the same.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_worker.models.decoders.latent.latent_config import EPS, LatentConfig
from gpu_worker.ops import Ops


def expand(sizes: LatentConfig, layer: Mapping[str, Tensor], rows: Tensor, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [num_tokens, num_heads, width], and keys and values [num_tokens, 1, width], before what is rotated turns.

    `rows` has what queries are made of, what is rotated of the key, and the latent before its norm.
    """
    low, turning, latent = rows.split((rows.shape[1] - sizes.width, sizes.rotated, sizes.rank), dim=-1)
    if sizes.query_rank:
        low = ops.linear(ops.rms_norm(low.contiguous(), layer["q_norm"], EPS), layer["queries"])
    turned, plain = low.unflatten(-1, (-1, sizes.query)).split((sizes.rotated, sizes.plain), dim=-1)
    matrices = layer["latent_keys"].unflatten(0, (-1, sizes.rank))
    queries = torch.cat((turned, torch.einsum("thd,hrd->thr", plain, matrices)), dim=-1)
    key = torch.cat((turning, ops.rms_norm(latent.contiguous(), layer["k_norm"], EPS)), dim=-1).unsqueeze(1)
    return queries, key, key.clone()


def values_of(sizes: LatentConfig, layer: Mapping[str, Tensor], attended: Tensor) -> Tensor:
    """[num_tokens, num_heads, values] of what attention gives: of the latents, as what is rotated is no value."""
    matrices = layer["latent_values"].unflatten(0, (-1, sizes.values))
    return torch.einsum("thr,hvr->thv", attended[..., sizes.rotated :], matrices)
