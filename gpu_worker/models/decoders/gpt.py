"""GPT-like decoders: layer norms, an MLP without a gate, and positions that are learned, rotary or ALiBi.

`prepare` brings a checkpoint of any of the families into one form: matrices as [out, in], the rows of qkv in the order
queries, keys, values, and rotated dimensions in halves.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.models.checkpoint.weights import CheckpointReader, ProgressCallback, WeightSource
from gpu_worker.models.decoders.activation import ElementFunction, gelu, gelu_tanh, silu
from gpu_worker.models.decoders.decoder import common_window
from gpu_worker.models.decoders.gpt_config import GptConfig
from gpu_worker.ops import AttentionOptions, Ops, TokenBatch

ROOT = "transformer."  # which a checkpoint of the model without its head leaves out
BUFFERS = tuple(f".{name}" for name in ("attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias"))
ACTIVATION_FUNCTIONS: dict[str, ElementFunction] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": functional.relu,
    "silu": silu,
}
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


class GptDecoder:
    """A GPT-like Decoder, on any device and any ops."""

    name = "gpt"
    capturable = True
    batch_invariant = True

    def __init__(self, config: GptConfig, tensors: Mapping[str, Tensor], ops: Ops, device: torch.device) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.context_tokens = config.context_tokens
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.window = common_window(config.windows)
        self._ops = ops
        self._tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._head = self._tensors.get("head", self._tensors["embedding"])
        self._activate = ACTIVATION_FUNCTIONS[config.activation]
        alibi = torch.tensor(config.alibi, device=device) if config.alibi else None
        layers = list(zip(config.scales, config.windows or (0,) * config.num_layers, strict=True))
        kinds = {kind: AttentionOptions(scale=kind[0], window=kind[1], alibi=alibi) for kind in set(layers)}
        self._options = [kinds[kind] for kind in layers]
        self._angles = None
        if config.rope is not None:
            dtype = self._head.dtype
            self._angles = [part.to(device, dtype) for part in config.rope.table(config.context_tokens)]

    def forward(self, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Tensor:
        x = self._tensors["embedding"][batch.token_ids]
        if "positions" in self._tensors:
            x = x + self._tensors["positions"][batch.positions]
        x = self._layer_norm(x, "embedding_norm")
        angles = [part[batch.positions] for part in self._angles] if self._angles else None
        after_norm = self.config.residual_after_norm
        for layer in range(self.num_layers):
            normed = self._layer_norm(x, f"{layer}.input_norm")
            attended = self._attend(layer, normed, kv[layer], batch, angles)
            if self.config.parallel:
                two_norms = f"{layer}.mlp_norm" in self._tensors
                x = attended + self._mlp(layer, self._layer_norm(x, f"{layer}.mlp_norm") if two_norms else normed) + x
            else:
                x = attended + (normed if after_norm else x)
                normed = self._layer_norm(x, f"{layer}.mlp_norm")
                x = self._mlp(layer, normed) + (normed if after_norm else x)
        return self._layer_norm(x[rows], "norm")

    def logits(self, hidden: Tensor) -> Tensor:
        return self._ops.logits(hidden, self._head, self._tensors.get("head_bias"))

    def _attend(self, layer: int, x: Tensor, kv: Tensor, batch: TokenBatch, angles: list[Tensor] | None) -> Tensor:
        config, ops = self.config, self._ops
        projected = self._linear(x, f"{layer}.qkv")
        if config.clip_qkv:
            projected = projected.clamp(-config.clip_qkv, config.clip_qkv)
        width = config.num_kv_heads * config.head_dim
        parts = list(projected.split((config.hidden_size, width, width), dim=-1))
        for index, name in enumerate(("q_norm", "k_norm")):
            parts[index] = self._layer_norm(parts[index], f"{layer}.{name}")
        queries, keys, values = (part.unflatten(-1, (-1, config.head_dim)) for part in parts)
        if angles is not None:
            queries = ops.rotary_cache_write(kv, queries, keys, values, angles[0], angles[1], batch)
        else:
            ops.cache_write(kv, keys, values, batch)
        attended = ops.paged_attention(queries, kv, batch, self._options[layer])
        return self._linear(attended.reshape(x.shape), f"{layer}.out")

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        return self._linear(self._activate(self._linear(x, f"{layer}.up")), f"{layer}.down")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return self._ops.linear(x, self._tensors[name], self._tensors.get(f"{name}_bias"))

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        """The norm of this name; `x` itself where the model has no such norm."""
        weight = self._tensors.get(name)
        if weight is None:
            return x
        return functional.layer_norm(x, weight.shape, weight, self._tensors.get(f"{name}_bias"), self.config.norm_eps)
