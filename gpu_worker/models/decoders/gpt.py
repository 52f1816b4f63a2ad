"""GPT-like decoders: layer norms, an MLP without a gate, and positions that are learned, rotary or ALiBi.

`prepare` brings a checkpoint of any of the families into one form: matrices as [out, in], the rows of qkv in the order
queries, keys, values, and rotated dimensions in halves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.models.checkpoint.weights import CheckpointReader, ProgressCallback, WeightSource
from gpu_worker.models.decoders.decoder import (
    ElementFunction,
    EncodePicture,
    EncodeTokens,
    LoadLora,
    common_window,
    gelu,
    gelu_tanh,
    silu,
)
from gpu_worker.models.decoders.rope import RopeParameters
from gpu_worker.ops import AttentionOptions, Ops, TokenBatch
from gpu_worker.ops.state_format import NO_STATE
from octavo.model_files.lora_support import NO_LORA
from octavo.pictures.support import NO_PICTURES
from octavo.text.encoded_prompt import NO_ENCODER

ACTIVATIONS = {  # by the names of Transformers
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

NORMS = frozenset({"embedding_norm", "norm", "input_norm", "mlp_norm", "q_norm", "k_norm"})
MATRICES = frozenset({"qkv", "out", "up", "down"})
# The names of the tensors in a checkpoint, by ours. Those of a layer come after the name of `layers` and its number.
GPT2_NAMES = {
    "embedding": "wte",
    "positions": "wpe",
    "norm": "ln_f",
    "layers": "h",
    "input_norm": "ln_1",
    "out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
GPTJ_NAMES = {
    "embedding": "wte",
    "norm": "ln_f",
    "layers": "h",
    "input_norm": "ln_1",
    "out": "attn.out_proj",
    "up": "mlp.fc_in",
    "down": "mlp.fc_out",
}
GPT_NEO_NAMES = GPT2_NAMES | {"out": "attn.attention.out_proj"}
FALCON_NAMES = {
    "embedding": "word_embeddings",
    "norm": "ln_f",
    "layers": "h",
    "input_norm": "input_layernorm",
    "out": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
BLOOM_NAMES = FALCON_NAMES | {"embedding_norm": "word_embeddings_layernorm"}
MPT_NAMES = {
    "embedding": "wte",
    "norm": "norm_f",
    "layers": "blocks",
    "input_norm": "norm_1",
    "out": "attn.out_proj",
    "mlp_norm": "norm_2",
    "up": "ffn.up_proj",
    "down": "ffn.down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """Sizes and variations, and where a checkpoint keeps the tensors."""

    names: Mapping[str, str]  # by our name: the name in the checkpoint; what has no name does not exist
    qkv: tuple[str, ...]  # the projections of queries, keys and values: one tensor, or three
    biased: frozenset[str]  # our names of what has a bias
    vocab_size: int
    context_tokens: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    norm_eps: float
    activation: str  # a value of ACTIVATIONS
    scales: tuple[float, ...]  # per layer: the factor of query · key
    tied: bool  # the output projection is the embedding
    windows: tuple[int, ...] = ()  # per layer: how many keys a query sees, 0: all; empty: all in every layer
    alibi: tuple[float, ...] = ()  # the slope of each head; empty: distance is not part of scores
    rope: RopeParameters | None = None
    clip_qkv: float = 0.0  # queries, keys and values are clamped to ± clip_qkv; 0: they are not
    parallel: bool = False  # attention and MLP read the same input, not one the other's output
    residual_after_norm: bool = False  # what attention and MLP are added to is the normed input
    transposed: bool = False  # matrices are stored as [in, out]
    grouped: bool = False  # rows of qkv are stored by key-value head: its queries, its key, its value
    quartered: bool = False  # rows of qkv are stored by quarter of the heads: their queries, values, keys
    interleaved: bool = False  # dimension 2i turns with 2i + 1, and not with i + half

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """The ALiBi slope of each head: 2^-x, where x rises in equal steps up to `bias_max`.

    If `num_heads` is no power of two, slopes are made for the next power of two. The heads get every second of them,
    and then the first, third, fifth and so on.
    """
    count = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * step / count) for step in range(1, count + 1)]
    return tuple(slopes if count == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


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
    load_lora: LoadLora | None = None
    lora_support = NO_LORA
    encode_picture: EncodePicture | None = None
    picture_support = NO_PICTURES
    encode: EncodeTokens | None = None
    encoder_support = NO_ENCODER

    def __init__(self, config: GptConfig, tensors: Mapping[str, Tensor], ops: Ops, device: torch.device) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.context_tokens = config.context_tokens
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.hidden_size = config.hidden_size
        self.window = common_window(config.windows)
        self.state = NO_STATE
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

    def states(self, forwarded: Tensor, first: int) -> Tensor:
        return forwarded[first:]

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
