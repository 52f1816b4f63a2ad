"""What is sent: conversations with invented prompts of given lengths, or those of a data set.

A conversation is requests that follow each other. The prompt of each has the earlier ones and their answers. Traffic is
a function of its seed. Both endpoints of a comparison get prompts of the same lengths in the same order, but other
words, so that neither finds the other's prompts in a prefix cache if the same workers serve both.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from octavo.client.arguments import Messages
from octavo.process.command_error import CommandError
from octavo.request.chat_messages import message_pairs
from octavo.request.errors import InvalidArgument
from octavo_bench.distributions import LengthDistribution
from octavo_bench.endpoints.base import BenchRequest
from octavo_bench.token_counter import TokenCounter

# Short words, each of which is one token with the space before it in most vocabularies.
_LISTED = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name team minute idea body back parent face others level
office door health person art war history party result change morning reason research girl guy moment air
teacher force education foot boy age policy music market sense nation plan college interest death course
someone experience behind reach local six remain effect
"""
WORDS = _LISTED.split()
MAX_TRIES = 8  # to meet an exact number of tokens
ROW_FORMS = 'write {"prompt": "…"}, {"messages": […]} or {"turns": ["…", …]}, and if you like "max_tokens"'
Content = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """What a user says (a text, token ids, or messages), and how many tokens the answer is to have."""

    content: Content | Messages
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
            return BenchRequest(_with_prefix(self.prefix, turn.content), turn.max_tokens)
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


def _with_prefix(prefix: Content, content: "Sequence[int] | Messages") -> "Sequence[int] | Messages":
    return [*prefix, *content] if prefix and not isinstance(prefix, str) else content


class Traffic(Protocol):
    """Makes the conversations of a round. `side` is 0, or 1 for the endpoint of --against."""

    def conversations(self, side: int, round_number: int) -> Iterator[Conversation]: ...


@dataclass(frozen=True, slots=True)
class SyntheticTraffic:
    """Invented prompts: random words, or random token ids below `vocab_size` if that is given."""

    seed: int
    prompt_tokens: LengthDistribution
    output_tokens: LengthDistribution
    prefix_tokens: int = 0
    num_prefixes: int = 1
    num_turns: int = 1
    think_time_s: float = 0.0  # the mean of an exponential distribution
    chat: bool = False
    vocab_size: int | None = None
    counter: TokenCounter | None = None

    def conversations(self, side: int, round_number: int) -> Iterator[Conversation]:
        """Conversations without an end. Those of one side share their prefixes over all rounds."""
        prefixes = [
            self._content(random.Random(f"{self.seed}/{side}/prefix/{number}"), self.prefix_tokens)
            for number in range(self.num_prefixes if self.prefix_tokens else 0)
        ]
        for number in count():
            shape = random.Random(f"{self.seed}/{round_number}/{number}")  # the same on both sides
            words = random.Random(f"{self.seed}/{side}/{round_number}/{number}")
            turns = [self._turn(shape, words, number) for number in range(self.num_turns)]
            prefix = shape.choice(prefixes) if prefixes else ""
            yield Conversation(number, turns, prefix, self.chat)

    def _turn(self, shape: random.Random, words: random.Random, number: int) -> ConversationTurn:
        pause_s = shape.expovariate(1 / self.think_time_s) if number and self.think_time_s else 0.0
        content = self._content(words, self.prompt_tokens.draw(shape))
        return ConversationTurn(content, self.output_tokens.draw(shape), pause_s)

    def _content(self, rng: random.Random, num_tokens: int) -> Content:
        if self.vocab_size is not None:
            return [rng.randrange(self.vocab_size) for _ in range(num_tokens)]
        return random_text(rng, num_tokens, self.counter)


def random_text(rng: random.Random, num_tokens: int, counter: TokenCounter | None) -> str:
    """A text of that many words, or with a counter of that many tokens, as nearly as whole words allow."""
    words = rng.choices(WORDS, k=num_tokens)
    if counter is not None:
        for _ in range(MAX_TRIES):
            excess = counter.count(_joined(words)) - num_tokens
            if excess == 0 or (excess > 0 and len(words) == 1):
                break
            if excess > 0:
                del words[max(1, len(words) - max(1, excess * len(words) // (num_tokens + excess))) :]
            else:
                words += rng.choices(WORDS, k=max(1, -excess * len(words) // (num_tokens + excess)))
    return _joined(words)


def _joined(words: Sequence[str]) -> str:
    return "".join(f" {word}" for word in words)


@dataclass(frozen=True, slots=True)
class DatasetTraffic:
    """The rows of a data set, in their order, over all rounds. After the last row the first one comes again.

    Both sides get the same rows. Lengths that a row does not name come from `output_tokens`.
    """

    seed: int
    rows: Sequence[Sequence[ConversationTurn]]  # max_tokens 0: the row does not name it
    output_tokens: LengthDistribution
    rows_per_round: int
    think_time_s: float = 0.0
    chat: bool = False

    def conversations(self, side: int, round_number: int) -> Iterator[Conversation]:
        for number in count():
            place = round_number * self.rows_per_round + number
            shape = random.Random(f"{self.seed}/{place}")
            turns = [
                ConversationTurn(
                    turn.content,
                    turn.max_tokens or self.output_tokens.draw(shape),
                    shape.expovariate(1 / self.think_time_s) if index and self.think_time_s else 0.0,
                )
                for index, turn in enumerate(self.rows[place % len(self.rows)])
            ]
            yield Conversation(number, turns, chat=self.chat)


def read_dataset(path: str, chat: bool) -> list[list[ConversationTurn]]:
    """The turns of each row of a file that has one JSON object per line, in a form of ROW_FORMS.

    Raises CommandError, which names the line, for what is no row.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--dataset: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"--dataset: {path} is no text in UTF-8: one JSON object per line is wanted") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append(_row(json.loads(line), chat))
            except (ValueError, RecursionError) as error:
                raise CommandError(f"--dataset: line {number} of {path}: {_reason(error)}") from None
    if not rows:
        raise CommandError(f"--dataset: {path} has no rows: {ROW_FORMS}")
    return rows


def _reason(error: Exception) -> str:
    if isinstance(error, InvalidArgument):
        return error.message
    return f"is no JSON; {ROW_FORMS}" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)


def _row(row: Any, chat: bool) -> list[ConversationTurn]:
    names = [name for name in ("prompt", "messages", "turns") if isinstance(row, dict) and name in row]
    if len(names) != 1:
        raise ValueError(f"has none or several of prompt, messages and turns; {ROW_FORMS}")
    name = names[0]
    content = row[name]
    max_tokens = row.get("max_tokens", 0)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 0:
        raise ValueError("max_tokens must be a whole number above 0")
    if name == "turns":
        if not (isinstance(content, list) and content and all(isinstance(turn, str) and turn for turn in content)):
            raise ValueError("turns must be a list of texts")
        return [ConversationTurn(turn, max_tokens) for turn in content]
    if name == "messages":
        if not chat:
            raise ValueError("has messages: add --chat")
        message_pairs(content, "messages")
        return [ConversationTurn(content, max_tokens)]
    if isinstance(content, str) and content:
        return [ConversationTurn(content, max_tokens)]
    if not (isinstance(content, list) and content and all(type(token) is int and token >= 0 for token in content)):
        raise ValueError("prompt must be a text or a list of token ids")
    if chat:
        raise ValueError("has token ids, which are no message: leave out --chat")
    return [ConversationTurn(content, max_tokens)]
