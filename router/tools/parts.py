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
class CallStart:
    """A call of a tool begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments of the call that began last. The pieces join to JSON."""

    text: str


Part = Content | Reasoning | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A whole call. `arguments` is JSON."""

    name: str
    arguments: str

    @property
    def parts(self) -> list[Part]:
        return [CallStart(self.name), CallArguments(self.arguments)]
