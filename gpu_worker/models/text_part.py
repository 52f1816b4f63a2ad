"""The text of models that read pictures or sound beside it: served alone, as if nothing else were in the files."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gpu_worker.models.checkpoint.weights import WeightSource
from octavo.request.errors import BadModel

HEAD = "lm_head."
_PLACE = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(.+)")
_PLAIN = re.compile(r"model\.(?:embed_tokens|layers|norm)\..+")  # Qwen2-VL's first files name them so


class TextSource:
    """The tensors of the text, by the names that they have in a model of text alone."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._stored: dict[str, str] = {}
        self.left_out: set[str] = set()  # names of the checkpoint that are not of its text
        for name in sorted(source.names()):
            plain = _plain_name(name)
            if not plain:
                self.left_out.add(name)
            elif self._stored.setdefault(plain, name) != name:
                raise BadModel(f"the checkpoint has one tensor of its text twice: {self._stored[plain]!r} and {name!r}")

    def names(self) -> set[str]:
        return set(self._stored)

    def get(self, name: str) -> Tensor:
        if name not in self._stored:
            raise BadModel(f"the checkpoint has no tensor of its text that would be {name!r}")
        return self._source.get(self._stored[name])


def _plain_name(name: str) -> str:
    """Empty: it is not of the text."""
    if name.startswith(HEAD) or _PLAIN.fullmatch(name):
        return name
    place = _PLACE.fullmatch(name)
    if place is None:
        return ""
    return place[1] if place[1].startswith(HEAD) else f"model.{place[1]}"


def text_config(name: str, content: Mapping[str, Any], has_head: bool) -> Mapping[str, Any]:
    """The configuration of the text, with what it leaves out as Transformers' class of the whole fills it in.

    `content` is the whole config.json, of one of model_kind.TEXT_PARTS. An output projection in the files is used, also
    where the configuration says that it is the embedding.
    """
    from transformers import CONFIG_MAPPING  # seconds of imports that other models do not need

    try:
        whole = CONFIG_MAPPING[content["model_type"]].from_dict(dict(content))
        text = whole.get_text_config()
        found: dict[str, Any] = text.to_dict()
    except Exception as error:  # whatever a class makes of values that it does not expect
        raise BadModel(f"{name}: config.json: {type(error).__name__}: {error}") from error
    tied = bool(whole.tie_word_embeddings or getattr(text, "tie_word_embeddings", False))
    found |= {"architectures": None, "tie_word_embeddings": tied and not has_head}
    for key in ("eos_token_id", "dtype", "torch_dtype", "quantization_config"):
        if content.get(key) is not None:
            found[key] = content[key]
    return found
