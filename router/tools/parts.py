"""What an output has beside plain content."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself, before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a tool. `arguments` is JSON."""

    name: str
    arguments: str


Part = Content | Reasoning | FunctionCall
