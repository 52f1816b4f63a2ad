"""Decoders of the Llama family (such as Llama, Mistral, Qwen, Phi-3, Gemma 1 to 3, OLMo 2 and 3, Granite, EXAONE 4).

RMS norms, rotary positions, grouped heads, gated MLP.

`prepare` brings a checkpoint into the form `LlamaDecoder` runs: query, key and value projections in one matrix, gate
and up in another. checkpoint/weight_cache.py keeps that form, so that workers can map it from disk and share it.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import CheckpointReader, ProgressCallback, WeightSource
from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.decoders.decoder import LoadLora, OwnDecoder, gelu_tanh
from gpu_worker.models.decoders.decoder_part import DecoderPart
from gpu_worker.models.decoders.experts import StackTensors, read_experts, run_divided_experts, run_experts
from gpu_worker.models.decoders.latent import latent_layer
from gpu_worker.models.decoders.latent.latent_config import LatentConfig
from gpu_worker.models.decoders.lora_weights import load, placed, support_of
from gpu_worker.ops import AttentionOptions, Ops, TokenBatch
from gpu_worker.ops.cuda_weights import CudaMatrix
from gpu_worker.ops.lora import add_lora
from octavo.model_files.lora_support import LoraSupport

FIRST_SOURCES = {  # the matrices of a layer, and the first tensor that each is made of
    "qkv": "self_attn.q_proj",
    "out": "self_attn.o_proj",
    "gate_up": "mlp.gate_proj",
    "down": "mlp.down_proj",
}
LATENT_SOURCES = {  # of latent attention, beside these: as latent_source names them
    "queries": "self_attn.q_b_proj",
    "latent_keys": "self_attn.k_b_proj",
    "latent_values": "self_attn.v_b_proj",
}
FUSED_SOURCES = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}  # Phi-3's are one matrix already
NO_LORA_ON_GPUS = LoraSupport(refusal="a group of GPUs has no adapters: leave --tensor-parallel out")
M = TypeVar("M")
SplitStack = Callable[[list[str]], list[list[str]]]  # a stack's tensors, by those that become one matrix


def prepare(
    source: WeightSource, config: LlamaConfig, dtype: torch.dtype, on_tensor: ProgressCallback
) -> dict[str, Tensor]:
    """The decoder's tensors by our names, in `dtype`. BadModel unless the checkpoint has exactly these tensors."""
    checkpoint = CheckpointReader(source, dtype, on_tensor)
    return collect(checkpoint, checkpoint.read_stacked, config)


def _whole(names: list[str]) -> list[list[str]]:
    return [names]


def collect(
    checkpoint: CheckpointReader, matrix: StackTensors[M], config: LlamaConfig, split: SplitStack = _whole
) -> dict[str, Tensor | M]:
    """The decoder's tensors by our names. `matrix` makes the embedding and each matrix of one or more tensors.

    Where `split` makes several matrices of a stack, those below the first are called `qkv.1` and `qkv.2`.

    A configuration may say that the output projection is the embedding though the checkpoint has another one. Then the
    checkpoint is right, as it is for Transformers.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    tensors: dict[str, Tensor | M] = {
        "embedding": matrix(["model.embed_tokens.weight"], [(vocab, hidden)]),
        "norm": _norm(checkpoint, "model.norm.weight", hidden, config),
    }
    for layer in range(config.num_layers):
        found = _layer(checkpoint, matrix, config, split, layer)
        tensors |= {f"{layer}.{name}": tensor for name, tensor in found.items()}
    if not config.tied or checkpoint.differs("lm_head.weight", "model.embed_tokens.weight"):
        tensors["head"] = matrix(["lm_head.weight"], [(vocab, hidden)])
    drafting = tuple(f"model.layers.{config.num_layers + layer}." for layer in range(config.drafting_layers))
    drafting = (*drafting, "mtp.") if drafting else ()
    checkpoint.check_all_read(
        # Quantizers write biases of zeros that the model does not have.
        lambda name: (
            name.endswith("rotary_emb.inv_freq")
            or name == "lm_head.weight"
            or name.startswith(drafting)
            or checkpoint.is_zero_bias(name)
        )
    )
    return tensors


def with_stored_parts(config: LlamaConfig, names: AbstractSet[str]) -> LlamaConfig:
    """The configuration with the optional parts of the file's first layer, where the file does not name them."""
    first = "model.layers.0."
    biased = {part for part, source in FIRST_SOURCES.items() if f"{first}{source}.bias" in names}
    normed = f"{first}self_attn.q_norm.weight" in names
    return replace(
        config, biased=config.biased | biased, head_norms=config.head_norms or (normed and not config.together_normed)
    )


def _layer(
    checkpoint: CheckpointReader, matrix: StackTensors[M], config: LlamaConfig, split: SplitStack, layer: int
) -> dict[str, Tensor | M]:
    prefix = f"model.layers.{layer}."
    hidden, inner = config.hidden_size, config.intermediate_size
    parts = {
        "qkv": ([f"self_attn.{x}_proj" for x in "qkv"], config.qkv_rows, hidden),
        "out": (["self_attn.o_proj"], [hidden], config.attended),
        "gate_up": (["mlp.gate_proj", "mlp.up_proj"], [inner, inner], hidden),
        "down": (["mlp.down_proj"], [hidden], inner),
    }
    if config.latent:
        parts |= _latent_parts(config, config.latent)
    if config.experts is not None and config.expert_layers[layer]:
        del parts["gate_up"], parts["down"]
    for name, whole in FUSED_SOURCES.items():
        if name in parts and f"{prefix}{whole}.weight" in checkpoint:
            parts[name] = ([whole], [sum(parts[name][1])], hidden)
    tensors: dict[str, Tensor | M] = {}
    for name, (sources, rows, columns) in parts.items():
        names = [f"{prefix}{s}.weight" for s in sources]
        shapes = {source: (r, columns) for source, r in zip(names, rows, strict=True)}
        for part, some in enumerate(split(names)):
            tensors[f"{name}.{part}" if part else name] = matrix(some, [shapes[source] for source in some])
        if name in config.biased:
            tensors[f"{name}_bias"] = checkpoint.read_stacked(
                [f"{prefix}{s}.bias" for s in sources], [(r,) for r in rows]
            )
    if config.experts is not None and config.expert_layers[layer]:
        tensors |= read_experts(checkpoint, matrix, config.experts, hidden, prefix)
    for name, norm in config.norms:
        tensors[name] = _norm(checkpoint, f"{prefix}{norm}.weight", hidden, config)
    if config.head_norms or config.together_normed:
        sizes = config.qkv_rows if config.together_normed else [config.head_dim] * 2
        for name, size in zip(("q_norm", "k_norm"), sizes, strict=False):
            tensors[name] = _norm(checkpoint, f"{prefix}self_attn.{name}.weight", size, config)
    if config.latent:
        norms = {
            "q_norm": ("q_a_layernorm", config.latent.query_rank),
            "k_norm": ("kv_a_layernorm", config.latent.rank),
        }
        for name, (source, size) in norms.items():
            if size:
                tensors[name] = checkpoint.read_tensor(f"{prefix}self_attn.{source}.weight", (size,))
    if config.sinks:
        tensors["sinks"] = checkpoint.read_floats(f"{prefix}self_attn.sinks", (config.num_heads,))
    return tensors


def _latent_parts(config: LlamaConfig, latent: LatentConfig) -> dict[str, tuple[list[str], list[int], int]]:
    """What differs of a layer with latent attention: sources, their rows and their columns."""
    heads, first = config.num_heads, "q_a_proj" if latent.query_rank else "q_proj"
    sources = [f"self_attn.{first}", "self_attn.kv_a_proj_with_mqa"]
    sizes = {"latent_keys": (latent.rank, latent.plain), "latent_values": (latent.values, latent.rank)}
    if latent.query_rank:
        sizes["queries"] = (latent.query, latent.query_rank)
    parts = {name: ([LATENT_SOURCES[name]], [heads * rows], columns) for name, (rows, columns) in sizes.items()}
    return {"qkv": (sources, config.qkv_rows, config.hidden_size), **parts}


def _norm(checkpoint: CheckpointReader, name: str, size: int, config: LlamaConfig) -> Tensor:
    """A norm's weight: in float32 where something is added to it, as sums near 1 would lose most of it in 16 bits."""
    if not config.norm_offset:
        return checkpoint.read_tensor(name, (size,))
    return checkpoint.read_floats(name, (size,)) + config.norm_offset


def layers_of(tensors: Mapping[str, M], num_layers: int) -> list[dict[str, M]]:
    """The tensors of each layer, by their names without the layer's number."""
    parts = [name.partition(".") for name in tensors]
    layers: list[dict[str, M]] = [{} for _ in range(num_layers)]
    for layer, dot, name in parts:
        if dot:
            layers[int(layer)][name] = tensors[f"{layer}.{name}"]
    return layers


class LlamaDecoder(OwnDecoder):
    """A Decoder of the Llama family, on any device and any ops."""

    name = "llama"
    batch_invariant = True

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, Any],
        ops: Ops,
        device: torch.device,
        ranks: DecoderPart | None = None,
    ) -> None:
        """`tensors` may have matrices of ops.cuda_weights for ops that multiply with them. They are those of this
        process's rank among `ranks`; None: there is one."""
        self.ranks = ranks or DecoderPart(config.num_kv_heads)
        self._is_divided = ranks is not None
        # Which experts a step runs depends on its numbers, and a rank speaks with others between kernels.
        self.capturable = config.experts is None and ranks is None
        on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
        self.formats = sorted({tensor.arithmetic for tensor in on_device.values() if isinstance(tensor, CudaMatrix)})
        super().__init__(config)
        self._embedding = on_device["embedding"]
        self.config = config.rounded_to(self._embedding.dtype)
        self._ops = ops
        self._norm = on_device["norm"]
        self._head = on_device.get("head", self._embedding)
        self._layers = layers_of(on_device, config.num_layers)
        dtype = self._embedding.dtype
        self._ropes = [
            tuple(x.to(device, dtype) for x in each.table(config.context_tokens))
            for each in (config.rope, config.near_rope)
            if each is not None
        ]
        self._rope_of = [int(config.near_rope is not None and window > 0) for window in config.windows]
        self._options = _options(config, self._layers)
        own, group = self.ranks.num_kv_heads * config.head_dim, config.num_heads // config.num_kv_heads
        self._own_rows = [own * group, own, own]
        self.lora_support = support_of(config) if ranks is None else NO_LORA_ON_GPUS
        self.load_lora: LoadLora | None = None
        self.batch_invariant = config.latent is None  # whose products by heads torch rounds by their shape
        if ranks is None and config.latent is None:
            self.load_lora = lambda files: placed(load(files, config), dtype, device)

    def forward(self, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Tensor:
        hidden: Tensor = self.ranks.forward(self, batch, kv, rows)
        return hidden

    def compute(self, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Tensor:
        """This rank's share of a step, and what all ranks make of that: the normed states of the rows."""
        angles = [(cos[batch.positions], sin[batch.positions]) for cos, sin in self._ropes]
        x = self._embedding[batch.token_ids]
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        first = self._layers[0].get("input_norm")
        normed = x if first is None else self._ops.rms_norm(x, first, self.config.norm_eps)
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, normed, kv[index], batch, *angles[self._rope_of[index]])
            normed, x = self._added(attended, x, layer.get("mlp_norm"))
            out = self._mlp(index, normed, batch)
            if index + 1 < len(self._layers):
                normed, x = self._added(out, x, self._layers[index + 1].get("input_norm"))
        return self._added(out[rows], x[rows], self._norm)[0]

    def _added(self, out: Tensor, x: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum, normed and as it is."""
        if self.config.sum_scale != 1.0:
            out = out * self.config.sum_scale
        if norm is not None:
            return self._ops.add_rms_norm(out, x, norm, self.config.norm_eps)
        total = out + x
        return total, total

    def states(self, forwarded: Tensor, first: int) -> Tensor:
        return forwarded[first:]

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.ranks.logits(self, hidden)
        if self.config.logit_divisor != 1.0:
            logits = logits / self.config.logit_divisor
        cap = self.config.logit_cap
        return torch.tanh(logits / cap) * cap if cap else logits

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Of the tokens of the vocabulary that this rank has."""
        return self._ops.logits(hidden, self._head)

    def _attend(self, index: int, x: Tensor, kv: Tensor, batch: TokenBatch, cos: Tensor, sin: Tensor) -> Tensor:
        layer, config, ops, ranks = self._layers[index], self.config, self._ops, self.ranks
        rows = self._product(index, "qkv", x, batch)
        if config.latent:
            queries, keys, values = latent_layer.expand(config.latent, layer, rows, ops)
        else:
            queries, keys, values = (
                part.view(x.shape[0], -1, config.head_dim) for part in self._together_normed(layer, rows)
            )
        if config.head_norms:
            queries = ops.rms_norm(queries, layer["q_norm"], config.norm_eps)
            keys = ops.rms_norm(keys, layer["k_norm"], config.norm_eps)
        if config.rotated[index]:
            queries = ops.rotary_cache_write(kv, queries, keys, values, cos, sin, batch)
        else:
            ops.cache_write(kv, keys, values, batch)
        attended = ops.paged_attention(queries, kv, batch, self._options[index])
        if config.latent:
            attended = latent_layer.values_of(config.latent, layer, attended)
        attended = ranks.join("attended", attended.reshape(x.shape[0], -1))
        out = ranks.join("out", self._product(index, "out", attended, batch))
        return ops.rms_norm(out, layer["attended_norm"], config.norm_eps) if "attended_norm" in layer else out

    def _together_normed(self, layer: Mapping[str, Tensor], rows: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values of all heads, normed together where a model does so."""
        queries, keys, values = rows.split(self._own_rows, dim=-1)
        if not self.config.together_normed:
            return queries, keys, values
        normed = []
        for name, own in (("q_norm", queries), ("k_norm", keys)):
            joined = self._ops.rms_norm(self.ranks.join(name, own), layer[name], self.config.norm_eps)
            normed.append(self.ranks.own(name, joined))
        return *normed, values

    def _mlp(self, index: int, x: Tensor, batch: TokenBatch) -> Tensor:
        layer = self._layers[index]
        if self.config.experts is not None and "router" in layer:
            if self._is_divided:
                return run_divided_experts(self.config.experts, layer, x, self._ops, self.ranks.join)
            return run_experts(self.config.experts, layer, x, self._ops)
        both = self._product(index, "gate_up", x, batch)
        inner = self._ops.silu_and_mul(both) if self.config.activation == "silu" else _gelu_and_mul(both)
        out = self.ranks.join("down", self._product(index, "down", self.ranks.join("inner", inner), batch))
        return self._ops.rms_norm(out, layer["output_norm"], self.config.norm_eps) if "output_norm" in layer else out

    def _product(self, index: int, name: str, x: Tensor, batch: TokenBatch) -> Tensor:
        layer = self._layers[index]
        y = self._ops.linear(x, layer[name], layer.get(f"{name}_bias"))
        return add_lora(self._ops.linear, batch.loras, index, name, x, y)


def _options(config: LlamaConfig, layers: Sequence[Mapping[str, Tensor]]) -> list[AttentionOptions]:
    """Of each layer. Layers without sinks that are of one kind share one object."""
    scale, cap = config.attention_scale, config.attention_cap
    kinds = list(zip(config.windows, config.sparse, strict=True))
    if config.sinks:
        return [
            AttentionOptions(scale, window, cap, sinks=layer["sinks"], sparse=sparse)
            for (window, sparse), layer in zip(kinds, layers, strict=True)
        ]
    shared = {kind: AttentionOptions(scale, kind[0], cap, sparse=kind[1]) for kind in set(kinds)}
    return [shared[kind] for kind in kinds]


def _gelu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gelu_tanh(gate) * up
