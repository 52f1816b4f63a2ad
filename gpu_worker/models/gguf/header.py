"""The settings of one architecture in a GGUF file, and whether all of them were understood.

A setting that the reader does not know may change what the model computes. So each one that is asked for is noted, and
`refuse_unknown` refuses a file that has others.
"""

from typing import Any

from octavo.model_files.gguf import GgufFile
from octavo.model_files.gguf_support import GPT, find_obstacle
from octavo.request.errors import BadModel

# Settings that no computation depends on, or that stand in the tensors' shapes as well.
HARMLESS = (
    *("attention.layer_norm_epsilon", "expert_feed_forward_length", "expert_shared_count", "feed_forward_length"),
    *("pooling_type", "vocab_size"),
)
MOST_CONTEXT = 1 << 24
SHAPED_BY_LAYER = ("gemma4",)  # whose layers have keys of several shapes
COUNTED_BY_LAYER = (  # some of which may have no keys
    *(*SHAPED_BY_LAYER, "granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "nemotron_h"),
    "nemotron_h_moe",
)
LATENT = ("deepseek2", "kimi-linear", "minicpm3")  # whose pages hold one vector for all heads
FUSED = (*GPT, "gptneox")  # whose models have queries, keys and values in one tensor
WITHOUT_KEYS = ("mamba", "mamba2")  # whose files say that they have no heads
GATED = ("qwen35", "qwen35moe", "qwen3next")  # each head of their queries has a gate of its size
HARMLESS_ENDS = ("expert_shared_feed_forward_length", "rope.scaling.finetuned", "tensor_data_layout")


def architecture(file: GgufFile) -> str:
    """The file's architecture, one of gguf_support.ARCHITECTURES. BadModel says why the file cannot be read."""
    if obstacle := find_obstacle(file):
        raise BadModel(f"{file.path.name}: {obstacle}")
    return file.metadata.string("general.architecture")


class GgufSettings:
    """The settings of a file by their names without the architecture."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.name = file.path.name
        self.file = file
        self.arch = arch
        self._asked: set[str] = set()

    def integer(self, key: str, default: int | None = None) -> int:
        return self.file.metadata.integer(self._full(key), default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.file.metadata.number(self._full(key), default)

    def text(self, key: str, default: str) -> str:
        return self.file.metadata.string(self._full(key), default)

    def get(self, key: str) -> Any:
        """The value as the file has it; None if it has none."""
        return self.file.metadata.get(self._full(key))

    def refuse_others(self, head_dim: int) -> None:
        """BadModel for a model of another kind: of gaps, or with values of another size than keys."""
        if self.get("attention.causal") is False:
            raise BadModel(f"{self.name}: {self.arch}.attention.causal is false: it predicts no next token")
        if self.integer("attention.value_length", head_dim) != head_dim:
            raise BadModel(f"{self.name}: keys and values have different sizes ({self.arch}.attention.value_length)")

    def refuse_unknown(self) -> None:
        """BadModel if the file has a setting of this architecture that was not asked for, and is not harmless."""
        prefix = f"{self.arch}."
        keys = [key.removeprefix(prefix) for key in self.file.metadata if key.startswith(prefix)]
        unknown = [key for key in keys if key not in self._asked and key not in HARMLESS + HARMLESS_ENDS]
        if unknown:
            listed = ", ".join(prefix + key for key in sorted(unknown)[:5])
            raise BadModel(
                f"{self.name} has settings that octavo does not know, so it might compute other: {listed}; "
                "use a directory of this model"
            )

    def _full(self, key: str) -> str:
        self._asked.add(key)
        return f"{self.arch}.{key}"


class GgufHeader(GgufSettings):
    """Settings with the shapes of the file's tensors."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        super().__init__(file, arch)
        self.layers = self.integer("block_count")
        self.hidden = self.integer("embedding_length")
        self.heads = self.integer("attention.head_count")
        fewest = 0 if arch in WITHOUT_KEYS else 1
        if not 1 <= self.layers <= len(file.tensors) or not fewest <= self.heads <= self.hidden:
            raise BadModel(f"{self.name}: {self.heads} heads, {self.layers} layers in {len(file.tensors)} tensors")
        keys = "attn_kv_a_mqa" if arch in LATENT else "attn_k"
        attending = (layer for layer in range(self.layers) if self.has(f"blk.{layer}.{keys}.weight"))
        self.first_attending = next(attending, 0)  # others have recurrent layers before it
        self.kv_head_counts, self.head_dims = self._shapes()  # by layer
        self.kv_heads, self.head_dim = self.kv_head_counts[self.first_attending], self.head_dims[0]
        self.context = self.integer("context_length")
        if self.kv_heads < fewest:
            raise BadModel(f"{self.name}: {self._full('attention.head_count_kv')} is {self.kv_heads}")
        self._check_sizes()

    def sizes(self) -> dict[str, Any]:
        """What every configuration of Transformers says alike."""
        return {
            "vocab_size": self.shape("token_embd.weight")[0],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": not self.has("output.weight"),
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }

    def _check_sizes(self) -> None:
        """BadModel unless the sizes are those of the tensors: no memory is taken for what the file only claims."""
        if not 1 <= self.context <= MOST_CONTEXT:
            raise BadModel(f"{self.name}: {self.arch}.context_length is {self.context}")
        at = f"blk.{self.first_attending}"
        if self.has(f"{at}.attn_qkv.weight") and self.arch not in FUSED:
            raise BadModel(f"{self.name} has queries, keys and values in one tensor: convert it without --fuse-qkv")
        heads = {"attn_q": self.heads * (2 if self.arch in GATED else 1), "attn_k": self.kv_heads}
        if self.arch in FUSED:
            heads = {"attn_qkv": self.heads + 2 * self.kv_heads}
        expected: dict[str, tuple[int | None, int]] = {"token_embd.weight": (None, self.hidden)}
        if self.arch in LATENT:
            expected[f"{at}.attn_kv_a_mqa.weight"] = (None, self.hidden)
        elif self.arch not in WITHOUT_KEYS:
            expected |= {f"{at}.{part}.weight": (count * self.head_dim, self.hidden) for part, count in heads.items()}
        for tensor, (rows, columns) in expected.items():
            found = self.shape(tensor)
            if len(found) != 2 or found[0] != (rows or found[0]) or found[1] != columns:
                raise BadModel(
                    f"{self.name}: tensor {tensor!r} is {found}, the header says {rows or 'any'} x {columns}"
                )

    def _shapes(self) -> tuple[list[int], list[int]]:
        """How many heads the keys of each layer have, and of what size."""
        size = self.integer("attention.key_length", self.hidden // max(1, self.heads))
        counts = self.get("attention.head_count_kv")
        if self.arch not in COUNTED_BY_LAYER or not isinstance(counts, list):
            counts = [self.integer("attention.head_count_kv", self.heads)] * self.layers
        if len(counts) != self.layers or not all(isinstance(count, int) and count >= 0 for count in counts):
            raise BadModel(f"{self.name}: {self._full('attention.head_count_kv')} has no number for each layer")
        if self.arch not in SHAPED_BY_LAYER:
            return counts, [size] * self.layers
        near = self.integer("attention.key_length_swa", size)
        return counts, [near if kind == "sliding_attention" else size for kind in self.layer_types(1, 1)]

    def shape(self, tensor: str) -> tuple[int, ...]:
        """BadModel if the file has no such tensor."""
        if tensor not in self.file.tensors:
            raise BadModel(f"{self.name} has no tensor {tensor!r}")
        return tuple(self.file.tensors[tensor].shape)

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def inner_size(self, part: str = "ffn_down", layer: int = 0) -> int:
        return self.shape(f"blk.{layer}.{part}.weight")[-1]

    def experts(self, layer: int = 0) -> tuple[int, int]:
        """How many a layer has, and how many of them a token asks. BadModel unless a layer that has some has these."""
        count, used = self.integer("expert_count"), self.integer("expert_used_count")
        stored = self.shape(f"blk.{layer}.ffn_down_exps.weight")[0]
        if count != stored or not 1 <= used <= count:
            raise BadModel(f"{self.name}: {used} of {count} experts, and tensors of {stored}")
        return count, used

    def layer_types(self, window: int, period: int) -> list[str]:
        """What each layer sees: by the file's pattern if it has one, or all keys in the last layer of each period."""
        pattern = self.get("attention.sliding_window_pattern")
        if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
            period = pattern
        elif pattern is not None and (not isinstance(pattern, list) or len(pattern) < self.layers):
            raise BadModel(f"{self.name}: {self._full('attention.sliding_window_pattern')} is {pattern!r}")
        windowed = [bool(each) for each in pattern] if isinstance(pattern, list) else None
        kinds = windowed or [(layer + 1) % period != 0 for layer in range(self.layers)]
        return ["sliding_attention" if window and kind else "full_attention" for kind in kinds[: self.layers]]
