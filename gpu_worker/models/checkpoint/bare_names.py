"""Checkpoints of decoders without an output projection, as embedding models are stored: their names lack `model.`"""

from torch import Tensor

from gpu_worker.models.checkpoint.weights import WeightSource

PREFIX = "model."


class PrefixedSource:
    """A source whose tensors have names with the prefix."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def names(self) -> set[str]:
        return {PREFIX + name for name in self._source.names()}

    def get(self, name: str) -> Tensor:
        return self._source.get(name.removeprefix(PREFIX))


def is_bare(source: WeightSource) -> bool:
    """Whether the names are those of a decoder without a head."""
    return "embed_tokens.weight" in source.names()
