"""GPT-2: learned positions, layer norms with biases, matrices that are stored transposed, a key-value head per head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.models.weights import CheckpointReader, ProgressCallback, WeightSource
from gpu_worker.ops import AttentionOptions, Ops, TokenBatch
from octavo.errors import BadModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2Config:
    """Sizes, and the two variations of the scale of attention."""

    vocab_size: int
    context_tokens: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    scaled: bool
    scaled_by_layer: bool
    tied: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Gpt2Config":
        """Reads the content of config.json. BadModel if a value is missing or contradicts another."""
        try:
            hidden, num_heads = int(config["n_embd"]), int(config["n_head"])
            if hidden % num_heads:
                raise BadModel(f"config.json: n_embd {hidden} is no multiple of n_head {num_heads}")
            return cls(
                vocab_size=int(config["vocab_size"]),
                context_tokens=int(config["n_positions"]),
                hidden_size=hidden,
                intermediate_size=int(config.get("n_inner") or 4 * hidden),
                num_layers=int(config["n_layer"]),
                num_heads=num_heads,
                norm_eps=float(config["layer_norm_epsilon"]),
                scaled=bool(config.get("scale_attn_weights", True)),
                scaled_by_layer=bool(config.get("scale_attn_by_inverse_layer_idx", False)),
                tied=bool(config.get("tie_word_embeddings", True)),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise BadModel(f"config.json: {type(error).__name__}: {error}") from error


def is_gpt2(config: Mapping[str, Any]) -> bool:
    """Whether Gpt2Decoder computes what this configuration means."""
    return (
        config.get("model_type") == "gpt2"
        and config.get("activation_function", "gelu_new") in ("gelu_new", "gelu_pytorch_tanh")
        and not config.get("add_cross_attention")
    )


def prepare(
    source: WeightSource, config: Gpt2Config, dtype: torch.dtype, on_tensor: ProgressCallback
) -> dict[str, Tensor]:
    """The decoder's tensors; matrices are transposed to [out, in]."""
    checkpoint = CheckpointReader(source, dtype, on_tensor)
    root = "transformer." if "transformer.wte.weight" in checkpoint else ""
    hidden, inner = config.hidden_size, config.intermediate_size
    tensors = {
        "embedding": checkpoint.read_tensor(f"{root}wte.weight", (config.vocab_size, hidden)),
        "positions": checkpoint.read_tensor(f"{root}wpe.weight", (config.context_tokens, hidden)),
        "norm": checkpoint.read_tensor(f"{root}ln_f.weight", (hidden,)),
        "norm_bias": checkpoint.read_tensor(f"{root}ln_f.bias", (hidden,)),
    }
    matrices = {
        "qkv": ("attn.c_attn", hidden, 3 * hidden),
        "out": ("attn.c_proj", hidden, hidden),
        "up": ("mlp.c_fc", hidden, inner),
        "down": ("mlp.c_proj", inner, hidden),
    }
    for layer in range(config.num_layers):
        prefix = f"{root}h.{layer}."
        for name, (stored, columns, rows) in matrices.items():
            tensors[f"{layer}.{name}"] = checkpoint.read_tensor(
                f"{prefix}{stored}.weight", (columns, rows)
            ).T.contiguous()
            tensors[f"{layer}.{name}_bias"] = checkpoint.read_tensor(f"{prefix}{stored}.bias", (rows,))
        for name, norm in {"input_norm": "ln_1", "mlp_norm": "ln_2"}.items():
            tensors[f"{layer}.{name}"] = checkpoint.read_tensor(f"{prefix}{norm}.weight", (hidden,))
            tensors[f"{layer}.{name}_bias"] = checkpoint.read_tensor(f"{prefix}{norm}.bias", (hidden,))
    if not config.tied or checkpoint.differs("lm_head.weight", f"{root}wte.weight"):
        tensors["head"] = checkpoint.read_tensor("lm_head.weight", (config.vocab_size, hidden))
    checkpoint.check_all_read(
        lambda name: name.endswith((".attn.bias", ".attn.masked_bias")) or name == "lm_head.weight"
    )
    return tensors


class Gpt2Decoder:
    """GPT-2 as a Decoder."""

    name = "gpt2"
    capturable = True
    batch_invariant = True

    def __init__(self, config: Gpt2Config, tensors: Mapping[str, Tensor], ops: Ops, device: torch.device) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.context_tokens = config.context_tokens
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_heads
        self.head_dim = config.hidden_size // config.num_heads
        self._ops = ops
        self._tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._head = self._tensors.get("head", self._tensors["embedding"])
        base = self.head_dim**-0.5 if config.scaled else 1.0
        scales = [base / (layer + 1 if config.scaled_by_layer else 1) for layer in range(config.num_layers)]
        self._options = [AttentionOptions(scale=scale) for scale in scales]

    def forward(self, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Tensor:
        x = self._tensors["embedding"][batch.token_ids] + self._tensors["positions"][batch.positions]
        for layer in range(self.num_layers):
            x = x + self._attend(layer, self._layer_norm(x, f"{layer}.input_norm"), kv[layer], batch)
            inner = self._linear(self._layer_norm(x, f"{layer}.mlp_norm"), f"{layer}.up")
            x = x + self._linear(functional.gelu(inner, approximate="tanh"), f"{layer}.down")
        return self._layer_norm(x[rows], "norm")

    def logits(self, hidden: Tensor) -> Tensor:
        return self._ops.linear(hidden, self._head)

    def _attend(self, layer: int, x: Tensor, kv: Tensor, batch: TokenBatch) -> Tensor:
        heads = self._linear(x, f"{layer}.qkv").view(x.shape[0], 3 * self.num_kv_heads, self.head_dim)
        queries, keys, values = heads.chunk(3, dim=1)
        self._ops.cache_write(kv, keys, values, batch)
        attended = self._ops.paged_attention(queries, kv, batch, self._options[layer])
        return self._linear(attended.reshape(x.shape), f"{layer}.out")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return self._ops.linear(x, self._tensors[name], self._tensors[f"{name}_bias"])

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._tensors[name]
        return functional.layer_norm(x, weight.shape, weight, self._tensors[f"{name}_bias"], self.config.norm_eps)
