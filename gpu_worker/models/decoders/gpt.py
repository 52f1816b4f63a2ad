"""GPT-like decoders: layer norms, an MLP without a gate, and positions that are learned, rotary or ALiBi."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.models.decoders.decoder import ElementFunction, OwnDecoder, gelu, gelu_tanh, silu
from gpu_worker.models.decoders.decoder_part import DecoderPart
from gpu_worker.models.decoders.rope import RopeParameters
from gpu_worker.ops import AttentionOptions, Ops, TokenBatch

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


ACTIVATION_FUNCTIONS: dict[str, ElementFunction] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": functional.relu,
    "silu": silu,
}


class GptDecoder(OwnDecoder):
    """A GPT-like Decoder, on any device and any ops."""

    name = "gpt"
    batch_invariant = True

    def __init__(
        self,
        config: GptConfig,
        tensors: Mapping[str, Tensor],
        ops: Ops,
        device: torch.device,
        ranks: DecoderPart | None = None,
    ) -> None:
        """`tensors` are those of this process's rank among `ranks`; None: there is one."""
        super().__init__(config)
        self.config = config
        self.ranks = ranks or DecoderPart(config.num_kv_heads)
        self.capturable = ranks is None  # a rank speaks with others between kernels
        self._ops = ops
        self._tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._head = self._tensors.get("head", self._tensors["embedding"])
        self._activate = ACTIVATION_FUNCTIONS[config.activation]
        group = config.num_heads // config.num_kv_heads
        slopes = config.alibi[self.ranks.first_kv_head * group :][: self.ranks.num_kv_heads * group]
        alibi = torch.tensor(slopes, device=device) if slopes else None
        layers = list(zip(config.scales, config.windows or (0,) * config.num_layers, strict=True))
        kinds = {kind: AttentionOptions(scale=kind[0], window=kind[1], alibi=alibi) for kind in set(layers)}
        self._options = [kinds[kind] for kind in layers]
        self._angles = None
        if config.rope is not None:
            dtype = self._head.dtype
            self._angles = [part.to(device, dtype) for part in config.rope.table(config.context_tokens)]

    def forward(self, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Tensor:
        hidden: Tensor = self.ranks.forward(self, batch, kv, rows)
        return hidden

    def compute(self, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Tensor:
        """This rank's share of a step, and what all ranks make of that: the normed states of the rows."""
        return self.normed(self.run_layers(range(self.num_layers), self.embed(batch), batch, kv)[rows])

    def normed(self, states: Tensor) -> Tensor:
        """What comes after the last layer."""
        return self._layer_norm(states, "norm")

    def states(self, forwarded: Tensor, first: int) -> Tensor:
        return forwarded[first:]

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.ranks.logits(self, hidden)
        return logits

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Of the tokens of the vocabulary that this rank has."""
        return self._ops.logits(hidden, self._head, self._tensors.get("head_bias"))

    def embed(self, batch: TokenBatch) -> Tensor:
        x = self._tensors["embedding"][batch.token_ids]
        if "positions" in self._tensors:
            x = x + self._tensors["positions"][batch.positions]
        return self._layer_norm(x, "embedding_norm")

    def run_layers(self, layers: Iterable[int], x: Tensor, batch: TokenBatch, kv: Sequence[Tensor]) -> Tensor:
        angles = [part[batch.positions] for part in self._angles] if self._angles else None
        after_norm = self.config.residual_after_norm
        for layer in layers:
            normed = self._layer_norm(x, f"{layer}.input_norm")
            attended = self._attend(layer, normed, kv[layer], batch, angles)
            if self.config.parallel:
                two_norms = f"{layer}.mlp_norm" in self._tensors
                x = attended + self._mlp(layer, self._layer_norm(x, f"{layer}.mlp_norm") if two_norms else normed) + x
            else:
                x = attended + (normed if after_norm else x)
                normed = self._layer_norm(x, f"{layer}.mlp_norm")
                x = self._mlp(layer, normed) + (normed if after_norm else x)
        return x

    def _attend(self, layer: int, x: Tensor, kv: Tensor, batch: TokenBatch, angles: list[Tensor] | None) -> Tensor:
        config, ranks = self.config, self.ranks
        width, group = ranks.num_kv_heads * config.head_dim, config.num_heads // config.num_kv_heads
        projected = self._linear(x, f"{layer}.qkv") if width else x.new_empty((x.shape[0], 0))
        if config.clip_qkv:
            projected = projected.clamp(-config.clip_qkv, config.clip_qkv)
        parts = list(projected.split((width * group, width, width), dim=-1))
        for index, name in enumerate(("q_norm", "k_norm")):
            if name in config.names:  # of all heads together
                parts[index] = ranks.own(name, self._layer_norm(ranks.join(name, parts[index]), f"{layer}.{name}"))
        attended = parts[0]
        if width:
            attended = self._attend_heads(parts, kv, batch, angles, self._options[layer])
        return ranks.join("out", self._linear(ranks.join("attended", attended), f"{layer}.out"))

    def _attend_heads(
        self,
        parts: list[Tensor],
        kv: Tensor,
        batch: TokenBatch,
        angles: list[Tensor] | None,
        options: AttentionOptions,
    ) -> Tensor:
        queries, keys, values = (part.unflatten(-1, (-1, self.config.head_dim)) for part in parts)
        if angles is not None:
            queries = self._ops.rotary_cache_write(kv, queries, keys, values, angles[0], angles[1], batch)
        else:
            self._ops.cache_write(kv, keys, values, batch)
        return self._ops.paged_attention(queries, kv, batch, options).flatten(1)

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        inner = self.ranks.join("inner", self._activate(self._linear(x, f"{layer}.up")))
        return self.ranks.join("down", self._linear(inner, f"{layer}.down"))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return self._ops.linear(x, self._tensors[name], self._tensors.get(f"{name}_bias"))

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        """The norm of this name; `x` itself where the model has no such norm."""
        weight = self._tensors.get(name)
        if weight is None:
            return x
        return functional.layer_norm(x, weight.shape, weight, self._tensors.get(f"{name}_bias"), self.config.norm_eps)
