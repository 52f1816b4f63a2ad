"""A model without weights that takes pictures, files of pictures, and a chat template that shows them."""

import base64
import io
from typing import Any

import pytest
from PIL import Image

from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.pictures.support import PictureSupport
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer

PAD = 999  # the token of a placeholder
SUPPORT = PictureSupport(refusal="", token_id=PAD, cell=28, min_pixels=56 * 56, max_pixels=28 * 28 * 64)


def sighted_runner(**options: Any) -> WitnessRunner:
    return WitnessRunner(**{"step_s": 0.001, **options}, pictures=SUPPORT)


def file_of(seed: int, width: int = 100, height: int = 60, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (seed % 256, seed // 256, 99)).save(file, kind)
    return file.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64_of(data)}"


def give_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the byte tokenizer a chat template that shows pictures where messages have them."""

    def shown(part: dict[str, str]) -> list[int]:
        return [PAD] if part["type"] == "image" else list(part["text"].encode())

    def apply_chat(self: ByteTokenizer, messages: Any, begin_answer: bool = True, tools: Any = (), details: Any = (),
                   variables: Any = None) -> list[int]:  # fmt: skip
        tokens: list[int] = []
        for i, (role, content) in enumerate(messages):
            parts = details[i].get("content") if i < len(details) else None
            said = [token for part in parts for token in shown(part)] if parts else list(content.encode())
            tokens += [*f"<{role}>".encode(), *said]
        return tokens

    monkeypatch.setattr(ByteTokenizer, "apply_chat", apply_chat)
    monkeypatch.setattr(ByteTokenizer, "has_chat_template", True)
