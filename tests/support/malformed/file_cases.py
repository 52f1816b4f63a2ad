"""The corpus: which file of which seed is changed, and what loading the changed model must come to."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from malformed.mutations import mutate
from malformed.seed_models import write_folder, write_gguf_model

GPT_SIZES = {
    "model_type": "gpt2",
    "n_positions": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "tie_word_embeddings": True,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}


@dataclass(frozen=True, slots=True)
class FileCase:
    """A model, and the file of it that is changed."""

    name: str
    model: Path  # what --model is
    file: Path

    def write(self, original: bytes, seed: int) -> None:
        rng, suffix = random.Random(f"{self.name} {seed}"), self.file.suffix
        self.file.write_bytes(mutate(original, rng, is_json=suffix == ".json", is_text=suffix == ".jinja"))


def write_cases(directory: Path) -> list[FileCase]:
    """Writes the seeds into a new folder."""
    directory.mkdir()

    def of_file(name: str, kinds: Callable[[str], str], *, sentencepiece: bool, arch: str = "llama") -> FileCase:
        path = write_gguf_model(directory / f"{name}.gguf", kinds, sentencepiece=sentencepiece, arch=arch)
        return FileCase(name, path, path)

    def of_folder(name: str, file: str, *, shards: bool = False, **changes: object) -> FileCase:
        folder = write_folder(directory / name, shards=shards, **changes)
        if file == "chat_template.jinja":
            (folder / file).write_text(PLAIN_TEMPLATE)
        return FileCase(name, folder, folder / file)

    return [
        of_file("gguf-bytes", lambda name: "Q8_0" if "embed" in name else "Q4_0", sentencepiece=False),
        of_file("gguf-pieces", lambda name: "F16" if "mlp" in name else "Q5_1", sentencepiece=True),
        of_file("gguf-granite", lambda name: "Q8_0" if "mlp" in name else "F16", sentencepiece=False, arch="granite"),
        of_folder("safetensors", "model.safetensors"),
        of_folder("awq", "model.safetensors", quantization_config=AWQ),
        of_folder("config-awq", "config.json", quantization_config=AWQ),
        of_folder("shard", "a.safetensors", shards=True),
        of_folder("shard-index", "model.safetensors.index.json", shards=True),
        of_folder("config", "config.json"),
        of_folder("config-gpt", "config.json", **GPT_SIZES),
        of_folder("config-phi", "config.json", model_type="phi3", sliding_window=16, rope_scaling=LONGROPE),
        of_folder("config-fp8", "config.json", quantization_config=FP8),
        of_folder("generation-config", "generation_config.json"),
        of_folder("tokenizer", "tokenizer.json"),
        of_folder("tokenizer-config", "tokenizer_config.json"),
        of_folder("token-map", "special_tokens_map.json"),
        of_folder("template", "chat_template.jinja"),
    ]


LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "long_factor": [1.5] * 8,
    "short_factor": [1.0] * 8,
}
PLAIN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
)
