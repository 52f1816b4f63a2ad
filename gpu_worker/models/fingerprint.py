"""Names a model by its content, in milliseconds: two workers with equal fingerprints compute the same tokens.

Small files (configuration, tokenizer, chat template) are hashed whole. These parts of a file of weights are hashed: its
size, the first and last 4 MiB (where a GGUF file has its tokenizer), and 16 samples of 64 KiB between. That tells
models apart, fine-tunes of one model included, but it does not find a flipped bit. Neither paths nor times take part,
so machines with copies of the same files agree.
"""

import hashlib
from pathlib import Path

EDGE_BYTES = 4 << 20
SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 16
WHOLE_BYTES = 64 << 20  # so many bytes of a small file are hashed

CONTENT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "added_tokens.json",
    "chat_template.jinja",
)
PICTURE_FILES = ("preprocessor_config.json", "processor_config.json")  # of models that read pictures


def model_fingerprint(small_files: list[Path], weight_files: list[Path], variant: str = "") -> str:
    """The fingerprint, 32 hex digits. `variant` names what else changes tokens, such as a rounding of weights."""
    state = hashlib.blake2b(digest_size=16, person=b"octavo.model.v1")
    for path in small_files:
        with path.open("rb") as file:
            _add(state, path.name.encode(), file.read(WHOLE_BYTES))
    for path in weight_files:
        _add(state, path.name.encode() if len(weight_files) > 1 else b"", sample_file(path))
    if variant:  # its label is what fingerprints have had since a rounding was the only variant
        _add(state, b"rounding", variant.encode())
    return state.hexdigest()


def sample_file(path: Path) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        _add(state, str(size).encode())
        places = [(0, EDGE_BYTES), (max(0, size - EDGE_BYTES), EDGE_BYTES)]
        places += [(size * i // (NUM_SAMPLES + 1), SAMPLE_BYTES) for i in range(1, NUM_SAMPLES + 1)]
        for place, length in places:
            file.seek(place)
            _add(state, file.read(length))
    return state.digest()


def _add(state: "hashlib.blake2b", *parts: bytes) -> None:
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
