"""Which pictures a model takes: a worker knows it, and a router that has been told refuses others by name."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.pictures.picture import Picture
from octavo.request.errors import InvalidArgument

RATE = 16_000  # samples a second, of which models are made that take sounds
SAMPLES_PER_POSITION = 320  # an encoder has one position for so many
MOST_OBLONG = 200  # the longer side over the shorter one, as Qwen's own processor has it


class TooOblong(ValueError):
    """The message says how oblong a picture is, and how oblong it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSupport:
    """What a model takes. By default it takes none."""

    refusal: str = "the model takes no pictures: it is one of text alone"
    token_id: int = 0  # of placeholders
    cell: int = 0  # pixels of a side of the square that a placeholder shows
    min_pixels: int = 0  # to which a picture is enlarged that has fewer
    max_pixels: int = 0  # to which one is reduced that has more
    num_positions: int = 0  # of a model that takes sounds, and no pictures: the placeholders of each, of any length

    @property
    def is_sound(self) -> bool:
        return self.num_positions > 0

    @property
    def max_samples(self) -> int:
        """How many samples of a sound its encoder reads."""
        return self.num_positions * SAMPLES_PER_POSITION

    def require(self, field: str) -> None:
        """Raises InvalidArgument if the model takes none."""
        if self.refusal:
            remedy = "ask another model" if self.is_sound else "send text, or ask another model"
            raise InvalidArgument(field, f"{self.refusal}: {remedy}")

    def size_of(self, height: int, width: int, most_tokens: int) -> tuple[int, int]:
        """Height and width to which a picture of this size is resized: whole cells, and no more than `most_tokens`.

        It is what Qwen's processor computes, with a bound that may be lower than the model's own. Raises TooOblong.
        """
        if max(height, width) > MOST_OBLONG * min(height, width):
            raise TooOblong(f"of {width} x {height} pixels is too oblong, at most {MOST_OBLONG} to 1: cut it")
        cell, most = self.cell, min(self.max_pixels, most_tokens * self.cell**2)
        high, wide = round(height / cell) * cell, round(width / cell) * cell
        if high * wide > most:
            factor = math.sqrt(height * width / most)
            high, wide = (max(cell, math.floor(side / factor / cell) * cell) for side in (height, width))
        elif high * wide < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            high, wide = (math.ceil(side * factor / cell) * cell for side in (height, width))
        return high, wide

    def check_prompt(self, prompt: Sequence[int], pictures: Sequence[Picture], field: str = "pictures") -> None:
        """Raises InvalidArgument unless pictures and placeholders of the prompt are in the same places.

        So a picture that somebody has dropped on the way is never answered as if it were text.
        """
        if not pictures and (self.refusal or (self.token_id not in prompt and not self.is_sound)):
            return
        self.require(field)
        if self.is_sound and [(each.start, each.rows, each.columns) for each in pictures] != [
            (0, 1, self.num_positions)
        ]:
            raise InvalidArgument(field, "the model writes down what it hears: send speech, with one sound")
        places = [place for each in pictures for place in range(each.start, each.end)]
        if places != [place for place, token in enumerate(prompt) if token == self.token_id]:
            text = f"placeholders (token {self.token_id}) and pictures of the prompt are not in the same places"
            raise InvalidArgument(field, f"{text}: show pictures as parts of chat messages")


NO_PICTURES = PictureSupport()
