"""How families of models write reasoning, and how many tokens of an output are of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from octavo.text.tokenizers.tokenizer import AnyTokenizer
from router.tools.harmony import HarmonyCounter

HARMONY = "harmony"
NUM_LAST = 16  # tokens at the end of a prompt, in which the beginning of reasoning stands if it ends with one


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning stands before the answer, between two marks."""

    name: str
    begin: str
    end: str
    mark: str = ""  # is in the template; empty: `end` is
    after: str = ""  # stands between the reasoning and a call

    def is_begun(self, prompt: str) -> bool:
        """Whether a prompt, or its last text, ends where reasoning has begun."""
        return prompt.rstrip().endswith(self.begin)

    def counter(self, begins_inside: bool) -> "ReasoningCounter | HarmonyCounter":
        if self.name == HARMONY:
            return HarmonyCounter()
        return ReasoningCounter(self.begin.encode(), self.end.encode(), begins_inside)


FORMATS = (
    ReasoningFormat(HARMONY, "<|channel|>analysis<|message|>", "<|end|>", "<|channel|>", "<|start|>assistant"),
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
)
BY_NAME = {each.name: each for each in FORMATS}


@lru_cache(maxsize=64)
def reasoning_of(template: str) -> ReasoningFormat | None:
    """The format that a chat template shows; None if it shows none."""
    return next((each for each in FORMATS if (each.mark or each.end) in template), None)


def last_text(tokenizer: AnyTokenizer, prompt: Sequence[int]) -> str:
    """The end of a prompt as text, special tokens included."""
    return tokenizer.decode(list(prompt[-NUM_LAST:]), skip_special_tokens=False)


class ReasoningCounter:
    """Counts the tokens of one output up to the one that completes the mark at the end of the reasoning.

    The mark at the beginning counts, too, if it is in the output. It is given the bytes of each token: the number is a
    function of the output's tokens alone.
    """

    def __init__(self, begin: bytes, end: bytes, begins_inside: bool) -> None:
        self._begin = begin
        self._end = end
        self._inside: bool | None = True if begins_inside else None  # None: nobody knows yet
        self._text = b""
        self.num_tokens = 0

    def add(self, tokens: Iterable[bytes]) -> None:
        for token in tokens:
            if self._inside is False:
                return
            self.num_tokens += 1
            self._text += token
            if self._inside is None:
                self._look_at_begin()
            if self._inside:
                self._look_for_end()

    def _look_at_begin(self) -> None:
        text = self._text.lstrip()
        if text.startswith(self._begin):
            self._inside, self._text = True, text[len(self._begin) :]
        elif not self._begin.startswith(text):
            self._inside, self.num_tokens, self._text = False, 0, b""
        else:
            self._text = text  # white space is not looked at again

    def _look_for_end(self) -> None:
        if self._end in self._text:
            self._inside, self._text = False, b""
        else:
            self._text = self._text[-len(self._end) + 1 :]

    def finish(self) -> int:
        """The number of tokens in an output that has ended. One that has not begun its reasoning has none."""
        return 0 if self._inside is None else self.num_tokens
