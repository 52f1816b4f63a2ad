"""The parts of one output, token by token: they depend on the tokens alone, and not on how they came.

A session brings as many tokens at a time as have come. What is made of them here is made as if each had come alone, so
that any router makes the same of the same journal, in the same steps.
"""

from collections.abc import Iterator, Sequence

from octavo.request.sampling import FinishReason
from octavo.text.stop import TextStream
from octavo.text.tokenizers.tokenizer import AnyTokenizer
from router.tools.harmony import HarmonyParser
from router.tools.output_forms import Division
from router.tools.output_parser import OutputParser, parser_for
from router.tools.parts import CallStart, Content, Part


class OutputParts:
    """The output of one branch. Without a division all of it is content."""

    def __init__(self, text: TextStream, tokenizer: AnyTokenizer, division: Division | None) -> None:
        """`text` must be a new one."""
        self._text = text
        self._token_bytes = tokenizer.token_bytes
        self._parser = None if division is None else new_parser(division)
        reasoning = None if division is None else division.reasoning
        self._counter = reasoning.counter(division.begins_inside) if reasoning is not None and division else None
        self.finish = FinishReason.NONE
        self.num_tokens = 0
        self.num_calls = 0

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._counter is None else self._counter.finish()

    @property
    def stop_string(self) -> str:
        """The stop string that has ended the output; empty if none has."""
        return self._text.matched

    def push(self, token_ids: Sequence[int], finish: int = FinishReason.NONE) -> Iterator[list[Part]]:
        """The parts that have become certain with each token, and then those that the end makes certain."""
        for token_id in token_ids:
            if self._text.stopped:
                break
            self.num_tokens += 1
            if self._counter is not None:
                self._counter.add((self._token_bytes(token_id),))
            yield self._noted(self._parts(self._text.push((token_id,)).text))
        if self._text.stopped:
            finish = FinishReason.STOP
        if finish and not self.finish:
            self.finish = FinishReason(finish)
            yield self._noted(self._last_parts())

    def _parts(self, text: str) -> list[Part]:
        if self._parser is not None:
            return self._parser.push(text)
        return [Content(text)] if text else []

    def _last_parts(self) -> list[Part]:
        parts = self._parts(self._text.finish().text)
        if self._parser is not None:
            parts += self._parser.finish(was_cut=self.finish is not FinishReason.STOP)
        return parts

    def _noted(self, parts: list[Part]) -> list[Part]:
        self.num_calls += sum(isinstance(part, CallStart) for part in parts)
        return parts


def new_parser(division: Division) -> OutputParser | HarmonyParser:
    """The parser of an output of which nothing has come yet."""
    schemas, form = ({}, None) if division.tools is None else (division.tools.schemas, division.form)
    return parser_for(form, schemas, division.reasoning, begins_inside=division.begins_inside)
