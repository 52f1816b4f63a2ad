"""transformers with the demo model, for `_sides.py`: one static batch, nothing over a network."""

import json
from pathlib import Path
from typing import Any

from gpu_worker.models.checkpoint.locate import demo_file


class Peer:
    """transformers, loaded from the same file."""

    def __init__(self, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = demo_file()
        options = {"gguf_file": path.name, "dtype": getattr(torch, dtype)}
        self._inference_mode = torch.inference_mode
        self._model: Any = AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")

    def save(self, folder: Path) -> None:
        """As a Transformers folder in float32, which `save_pretrained` refuses to write of a GGUF file."""
        from safetensors.torch import save_file

        tied = ("lm_head.weight",) if self._model.config.tie_word_embeddings else ()
        weights = {name: data.float() for name, data in self._model.state_dict().items() if name not in tied}
        save_file(weights, folder / "model.safetensors")
        config = {**self._model.config.to_dict(), "dtype": "float32"}
        config.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(config))
        self._tokenizer.save_pretrained(folder)

    def generate(self, texts: list[str], num_tokens: int) -> None:
        encoded = self._tokenizer(texts, padding=True, return_tensors="pt")
        limits = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "pad_token_id": 0}
        with self._inference_mode():
            self._model.generate(**encoded, do_sample=False, **limits)
