"""Chats with pictures in simulated traffic: files of three bytes, read without a process, for the witness's slots."""

import base64
import random
from dataclasses import dataclass
from typing import Any

import router.streaming.prompts.picture_prompts as picture_prompts
from gpu_worker.testing.pretended_pictures import words_of
from octavo.pictures.picture import digest_pixels
from octavo.pictures.reader import PictureLimits, ReadPicture
from octavo.pictures.support import PictureSupport
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer

SHARE = 0.25  # of the streams that neither die nor differ by worker
PAD = 997  # the token of a placeholder
SUPPORT = PictureSupport(refusal="", token_id=PAD, cell=1, min_pixels=1, max_pixels=10**6)
CACHE_BYTES = 8 * 90  # of a worker: about four pictures, so that they go and come again
FILES = [bytes((rows, columns, number)) for rows, columns in ((2, 4), (5, 5), (3, 13)) for number in range(3)]
TEXTS = ("", "see", "which one may it be? ")  # few: most pictures stand where others have stood
BEGINNING = "<user>"


@dataclass
class PictureChat:
    """One message of texts and pictures."""

    parts: list[str | bytes]

    @classmethod
    def drawn(cls, rng: random.Random) -> "PictureChat":
        parts: list[str | bytes] = [rng.choice(TEXTS), rng.choice(FILES)]
        if rng.random() < 0.4:
            parts += ["or", rng.choice(FILES)]
        return cls(parts)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [_sent(part) for part in self.parts]}]

    @property
    def prompt(self) -> list[int]:
        tokens = list(BEGINNING.encode())
        for part in self.parts:
            tokens += [PAD] * (part[0] * part[1]) if isinstance(part, bytes) else part.encode()
        return tokens

    @property
    def words(self) -> dict[int, int]:
        """What a witness sees of pictures, by position."""
        found: dict[int, int] = {}
        place = len(BEGINNING)
        for part in self.parts:
            if isinstance(part, bytes):
                found |= enumerate(map(int, words_of(_pixels(part), part[0] * part[1])), place)
                place += part[0] * part[1]
            else:
                place += len(part)
        return found


def _sent(part: str | bytes) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = f"data:image/png;base64,{base64.b64encode(part).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _pixels(file: bytes) -> bytes:
    return bytes([file[2]]) * (3 * file[0] * file[1])


class DirectReader:
    """In place of PictureReaders, whose processes live in real time."""

    def read(self, data: bytes, support: PictureSupport, limits: PictureLimits, salt: str, field: str) -> ReadPicture:
        pixels, (rows, columns) = _pixels(data), data[:2]
        return ReadPicture(digest_pixels(pixels, rows, columns, salt), rows, columns, pixels)


def apply_chat(
    tokenizer: ByteTokenizer, messages: Any, begin_answer: bool = True, tools: Any = (), details: Any = ()
) -> list[int]:
    """One message, as PictureChat has it."""
    tokens = list(BEGINNING.encode())
    for part in details[0]["content"]:
        tokens += [PAD] if part["type"] == "image" else part["text"].encode()
    return tokens


def install() -> None:
    picture_prompts.READERS = DirectReader()
    ByteTokenizer.apply_chat = apply_chat
    ByteTokenizer.has_chat_template = True
