"""A conversation: requests that follow each other. The prompt of each has the earlier ones and their answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.cli.bench.endpoint_base import BenchRequest
from octavo.client.arguments import Messages

Content = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """What a user says (a text, token ids, or messages), and how many tokens the answer is to have."""

    content: "Content | Messages"
    max_tokens: int
    pause_s: float = 0.0  # between the answer before and this turn


@dataclass(slots=True)
class Conversation:
    """The turns of one user. `prefix` comes first in the prompt, and several conversations share it."""

    number: int
    turns: Sequence[ConversationTurn]
    prefix: Content = ""
    chat: bool = False
    answers: list[str] = field(default_factory=list)

    def next_request(self) -> BenchRequest:
        """The request of the turn after the last answer."""
        turn = self.turns[len(self.answers)]
        if not isinstance(turn.content, str):
            return BenchRequest(_joined(self.prefix, turn.content), turn.max_tokens)
        said = [str(each.content) for each in self.turns[: len(self.answers) + 1]]
        if not self.chat:
            told = [part for pair in zip(said, self.answers, strict=False) for part in pair]
            return BenchRequest(str(self.prefix) + "".join([*told, said[-1]]), turn.max_tokens)
        messages = [{"role": "system", "content": str(self.prefix)}] if self.prefix else []
        for user, assistant in zip(said, self.answers, strict=False):
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return BenchRequest([*messages, {"role": "user", "content": said[-1]}], turn.max_tokens)

    @property
    def has_ended(self) -> bool:
        return len(self.answers) == len(self.turns)


def _joined(prefix: Content, content: "Sequence[int] | Messages") -> "Sequence[int] | Messages":
    return [*prefix, *content] if prefix and not isinstance(prefix, str) else content
