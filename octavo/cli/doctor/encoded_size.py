"""What a folder of a model with an encoder and a decoder needs: of text (T5, BART), or of speech (Whisper).

Its layers run through Transformers. What `--quantization` rounds are linear layers; embeddings stay as they are, and if
one is the output projection as well, that is a copy of it in 8 bits.
"""

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from octavo.cli.doctor.sized_model import (
    AS_THEY_ARE,
    COLUMNS,
    HALVES,
    HEAD,
    LEAST_ROWS,
    ROUNDED,
    ModelSize,
    SizedTensor,
)

FLOAT = 4.0  # bytes of a number, whatever the file has
SHARED = ("shared.weight", "model.shared.weight")  # by encoder and decoder
EMBEDDING = re.compile(r"(.*\.)?(shared|embed_tokens|embed_positions|relative_attention_bias)\.weight")
TIED = re.compile(r"(model\.)?(shared|decoder\.embed_tokens)\.weight")  # which is the output projection without a head


def encoded_size(shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> ModelSize:
    """That of a folder with tensors of these shapes."""
    is_shared = "d_kv" in config or config.get(
        "tie_word_embeddings", True
    )  # of T5 whatever it says, as in Transformers
    if is_shared and any(name in shapes for name in SHARED):  # what the file has of it once more is no other tensor
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith("embed_tokens.weight")}
    tied = [] if any(map(HEAD.fullmatch, shapes)) else [shape for name, shape in shapes.items() if TIED.fullmatch(name)]
    return ModelSize(
        [SizedTensor(name, prod(shape), FLOAT, _rounds(name, shape)) for name, shape in shapes.items()],
        [AS_THEY_ARE, HALVES, *ROUNDED],
        slots=_slots(config),
        copied=prod(tied[0]) if tied else 0,
    )


def _rounds(name: str, shape: Sequence[int]) -> bool:
    is_matrix = len(shape) == 2 and shape[0] >= LEAST_ROWS and not shape[1] % COLUMNS
    return is_matrix and not EMBEDDING.fullmatch(name)


def _slots(config: Mapping[str, Any]) -> int:
    """Numbers of keys and values of a token, of prompt or output; 0: the configuration says it by other names."""
    layers = config.get("num_decoder_layers") or config.get("decoder_layers") or config.get("num_layers")
    width = config["num_heads"] * config["d_kv"] if "d_kv" in config else config.get("d_model")
    return 2 * int(layers) * int(width) if layers and width else 0
