"""What is sent: conversations with invented prompts of given lengths, or those of a data set.

Traffic is a function of its seed. Both endpoints of a comparison get prompts of the same lengths in the same order,
but other words, so that neither finds the other's prompts in a prefix cache if the same workers serve both.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from octavo.cli.bench.conversation import Content, Conversation, ConversationTurn
from octavo.cli.bench.lengths import LengthDistribution
from octavo.cli.bench.token_counter import TokenCounter

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
