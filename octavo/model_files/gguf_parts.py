"""The names of GGUF files that are parts of one model: NAME-00001-of-00003.gguf and so on."""

import re
from collections.abc import Sequence
from pathlib import Path

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
MOST_PARTS = 1 << 16


def model_name(path: Path) -> str:
    """What the model in a file is called: the file's name without its suffix, and without the number of a part."""
    match = _PART.fullmatch(path.stem)
    return match[1] if match else path.stem


def part_paths(first: Path, count: int) -> list[Path]:
    """The files of a model by its first one. Empty if that is not named as the first of `count` parts."""
    match = _PART.fullmatch(first.stem)
    if not match or (int(match[2]), int(match[3])) != (1, count):
        return []
    return [first.with_name(f"{match[1]}-{part:05}-of-{count:05}{first.suffix}") for part in range(1, count + 1)]


def first_parts(paths: Sequence[Path]) -> list[Path]:
    """The paths without those of second and later parts, so that each of them stands for a model."""
    matches = [(path, _PART.fullmatch(path.stem)) for path in paths]
    return [path for path, match in matches if not match or int(match[2]) == 1]
