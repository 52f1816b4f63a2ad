"""The configuration of a GPT-like decoder: layer norms, an MLP without a gate, and what families do differently."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpu_worker.models.decoders.rope import RopeParameters

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
