"""The pictures of a request: what its chat says of them, how they are read, and where they stand in its prompt."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from octavo.pictures.parts import (
    Part,
    PicturePart,
    data_of_url,
    is_data_url,
    pictures_of,
    template_content,
)
from octavo.pictures.reader import (
    NOTHING_SHOWN,
    READERS,
    PictureLimits,
    ReadPicture,
    ShownPictures,
    place_pictures,
    spoken_prompt,
)
from octavo.request import sampling_validation, validation
from octavo.request.errors import InvalidArgument
from octavo.text.tokenizers.byte_tokenizer import no_tokenizer
from octavo.v1 import inference_pb2
from router.fleet.model_registry import ServedModel
from router.streaming.prompts.chat_threads import run_aside
from router.streaming.prompts.picture_fetch import checked_url, fetch_picture
from router.streaming.prompts.picture_tally import PictureTally

FIELD = "chat.messages"
MAX_PARTS = 1024  # of a message
FETCHERS, READING = 4, 2  # threads of this router: a picture takes memory while it is read


class PicturePrompts:
    """Reads the pictures of requests."""

    def __init__(self, limits: PictureLimits, hosts: tuple[str, ...] = ()) -> None:
        self._limits = limits
        self._hosts = hosts
        self.tally = PictureTally()
        self._fetchers = ThreadPoolExecutor(FETCHERS, "fetched pictures")
        self._readers = ThreadPoolExecutor(READING, "pictures")

    def check_chat(self, chat: inference_pb2.Chat, model: ServedModel) -> None:
        """Raises InvalidArgument for what can be seen before anything is fetched or read."""
        pictures, most = _pictures_in(chat), self._limits.count
        with self.tally.refusing("model"):
            for each in pictures[:1]:
                model.pictures.require(each.field)
        with self.tally.refusing("count"):
            if len(pictures) > most:
                what = f"{len(pictures)} pictures; at most {most}: leave some out, or have picture_count raised"
                raise InvalidArgument(pictures[most].field, what)
        with self.tally.refusing("host"):
            for each in pictures:
                if each.url and not is_data_url(each.url):
                    checked_url(each.url, each.field, self._hosts)

    async def read(self, chat: inference_pb2.Chat, model: ServedModel, salt: str) -> list[ReadPicture]:
        """The pictures of the chat in their order. Raises InvalidArgument, or Unreachable."""
        self.check_chat(chat, model)
        return [await self._read_one(each, model, salt) for each in _pictures_in(chat)]

    async def read_spoken(
        self, speech: inference_pb2.Speech, model: ServedModel, salt: str
    ) -> tuple[list[int], ShownPictures]:
        """The prompt of a request that shows a sound. Raises InvalidArgument, or Unreachable."""
        known = model.encoder.speech
        with self.tally.refusing("model"):
            if known is None:
                raise InvalidArgument("speech", f"{model.name} does not hear: ask another model")
            model.pictures.require("speech")
        if speech.times and not model.first_time:
            raise InvalidArgument("speech.times", f"{model.name} has no tokens of times: leave it out")
        sampling_validation.check_token_ids("speech.previous_token_ids", speech.previous_token_ids, model.vocab_size)
        written = [token for token in speech.previous_token_ids if token != known.start]
        tokens = [*await _tokens_before(speech.previous_text, model), *written]
        start = known.start_of(speech.language, speech.task, tokens, "speech", times=speech.times)
        sound = await self._read_one(PicturePart("speech.sound", data=speech.sound), model, salt)
        return spoken_prompt(start, sound, model.pictures)

    async def _read_one(self, part: PicturePart, model: ServedModel, salt: str) -> ReadPicture:
        data, fetched = part.data, b""
        if part.url and is_data_url(part.url):
            with self.tally.refusing("data"):
                data = data_of_url(part.url, part.field, self._limits.num_bytes)
        elif part.url:
            with self.tally.refusing("fetch"):
                data = fetched = await self._fetch(part)
        loop, asked = asyncio.get_running_loop(), (model.pictures, self._limits, salt, part.field)
        with self.tally.refusing("file"):
            read = await loop.run_in_executor(self._readers, READERS.read, data, *asked)
        self.tally.read["fetched" if fetched else "sent"] += 1
        return replace(read, fetched=fetched)

    async def _fetch(self, part: PicturePart) -> bytes:
        asked = part.url, part.field, self._hosts, self._limits.num_bytes
        return await asyncio.get_running_loop().run_in_executor(self._fetchers, fetch_picture, *asked)

    def placed(
        self, tokens: list[int], pictures: Sequence[ReadPicture], model: ServedModel
    ) -> tuple[list[int], ShownPictures]:
        """The prompt with its pictures in their places. Raises InvalidArgument if the template shows others."""
        if not pictures:
            return tokens, NOTHING_SHOWN
        with self.tally.refusing("template"):
            return place_pictures(tokens, pictures, model.pictures, FIELD)


async def _tokens_before(text: str, model: ServedModel) -> list[int]:
    """The tokens of what was said before, which begin with a space as words in the middle of a text do."""
    if not text.strip():
        return []
    if not model.tokenizer.has_text:
        raise no_tokenizer("leave out speech.previous_text")
    most = model.context_tokens
    said = validation.validate_text(text, "speech.previous_text", context_tokens=most).strip()
    return await run_aside(len(said), lambda: model.tokenizer.encode_plain(f" {said}"))


def _pictures_in(chat: inference_pb2.Chat) -> list[PicturePart]:
    return [each for parts in parts_in(chat).values() for each in pictures_of(parts)]


def parts_in(chat: inference_pb2.Chat) -> dict[int, list[Part]]:
    """The parts of those messages that have any. Raises InvalidArgument for a part that is nothing."""
    found: dict[int, list[Part]] = {}
    for i, message in enumerate(chat.messages):
        if message.parts and message.WhichOneof("text"):
            raise InvalidArgument(f"{FIELD}[{i}].parts", "is not allowed beside content: put the text into a part")
        if len(message.parts) > MAX_PARTS:
            raise InvalidArgument(f"{FIELD}[{i}].parts", f"{len(message.parts)} parts; at most {MAX_PARTS}: join texts")
        if message.parts:
            found[i] = [_part(part, f"{FIELD}[{i}].parts[{j}]") for j, part in enumerate(message.parts)]
    return found


def _part(part: inference_pb2.ContentPart, path: str) -> Part:
    match part.WhichOneof("part"):
        case "text":
            return part.text
        case "picture":
            return PicturePart(f"{path}.picture", data=part.picture)
        case "picture_url":
            return PicturePart(f"{path}.picture_url", url=part.picture_url or " ")
    raise InvalidArgument(path, "has neither text nor picture nor picture_url: send one of them")


def with_contents(
    details: Sequence[Mapping[str, Any]], chat: inference_pb2.Chat, num_messages: int
) -> list[dict[str, Any]]:
    """The further fields of messages, in which those with parts have these as their contents."""
    parts = parts_in(chat)
    told = [dict(each) for each in details] or [{} for _ in range(num_messages)]
    for i, each in parts.items():
        told[i]["content"] = template_content(each)
    return told if parts else [dict(each) for each in details]
