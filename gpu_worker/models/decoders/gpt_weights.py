"""The tensors of GPT-like decoders.

`prepare` brings a checkpoint of any of the families into one form: matrices as [out, in], the rows of qkv in the order
queries, keys, values, and rotated dimensions in halves.
"""

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import CheckpointReader, ProgressCallback, WeightSource
from gpu_worker.models.decoders.gpt import GptConfig

ROOT = "transformer."  # which a checkpoint of the model without its head leaves out
BUFFERS = tuple(f".{name}" for name in ("attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias"))
OF_LAYER = ("input_norm", "q_norm", "k_norm", "out", "mlp_norm", "up", "down")
OF_MODEL = ("embedding", "positions", "embedding_norm", "norm")


def prepare(
    source: WeightSource, config: GptConfig, dtype: torch.dtype, on_tensor: ProgressCallback
) -> dict[str, Tensor]:
    """The decoder's tensors by our names, in `dtype`. BadModel unless the checkpoint has exactly these tensors."""
    checkpoint = CheckpointReader(source, dtype, on_tensor)
    root = ROOT if f"{ROOT}{config.names['embedding']}.weight" in checkpoint else ""
    hidden, width = config.hidden_size, config.num_kv_heads * config.head_dim
    shapes = {
        "embedding": (config.vocab_size, hidden),
        "positions": (config.context_tokens, hidden),
        **dict.fromkeys(("embedding_norm", "norm", "input_norm", "mlp_norm", "q_norm"), (hidden,)),
        "k_norm": (width,),
        "out": (hidden, hidden),
        "up": (config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
        "head": (config.vocab_size, hidden),
    }
    tensors: dict[str, Tensor] = {}

    def read(stored: str, name: str, shape: tuple[int, ...]) -> list[Tensor]:
        """The weight, and the bias if there is one."""
        if config.transposed and len(shape) == 2 and name not in (*OF_MODEL, "head"):
            weight = checkpoint.read_tensor(f"{stored}.weight", shape[::-1]).T.contiguous()
        else:
            weight = checkpoint.read_tensor(f"{stored}.weight", shape)
        return [weight, checkpoint.read_tensor(f"{stored}.bias", shape[:1])] if name in config.biased else [weight]

    def place(prefix: str, name: str, parts: list[Tensor]) -> None:
        tensors.update(zip((f"{prefix}{name}", f"{prefix}{name}_bias"), parts, strict=False))

    for name in OF_MODEL:
        if name in config.names:
            place("", name, read(root + config.names[name], name, shapes[name]))
    rows = (hidden + 2 * width,) if len(config.qkv) == 1 else (hidden, width, width)
    for layer in range(config.num_layers):
        prefix = f"{root}{config.names['layers']}.{layer}."
        for name in OF_LAYER:
            if name in config.names:
                place(f"{layer}.", name, read(prefix + config.names[name], name, shapes[name]))
        projections = [read(prefix + name, "qkv", (size, hidden)) for name, size in zip(config.qkv, rows, strict=True)]
        stacked = [torch.cat(parts) for parts in zip(*projections, strict=True)]
        place(f"{layer}.", "qkv", [_arranged(part, config) for part in stacked])
    if not config.tied or "lm_head.weight" in checkpoint:
        place("", "head", read("lm_head", "head", shapes["head"]))
        if torch.equal(tensors["head"], tensors["embedding"]):
            del tensors["head"]
    checkpoint.check_all_read(lambda name: name.endswith(BUFFERS))
    return tensors


def _arranged(rows: Tensor, config: GptConfig) -> Tensor:
    """The weight (or bias) of qkv with its rows in our order."""
    kv_heads, head_dim = config.num_kv_heads, config.head_dim
    if config.grouped:
        groups = rows.view(kv_heads, -1, head_dim, *rows.shape[1:])
        rows = torch.cat([groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)])
    if config.quartered:
        queries, values, keys = rows.view(4, 3, -1, *rows.shape[1:]).unbind(1)
        rows = torch.cat((queries, keys, values)).flatten(0, 1)
    if config.interleaved and config.rope is not None:
        rotated = torch.arange(config.rope.dim)
        order = torch.cat((rotated[::2], rotated[1::2], torch.arange(config.rope.dim, head_dim)))
        heads = rows.view(-1, head_dim, *rows.shape[1:])
        turned = config.num_heads + kv_heads
        rows = torch.cat((heads[:turned, order], heads[turned:])).flatten(0, 1)
    return rows
