"""The parts of one output, token by token: they depend on the tokens alone, and not on how they came.

A session brings as many tokens at a time as have come. What is made of them here is made as if each had come alone, so
that any router makes the same of the same journal, in the same steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.request.sampling import FinishReason
from octavo.text.stop import TextStream
from octavo.text.tokenizer import AnyTokenizer
from router.tools.asked_tools import tool_format
from router.tools.output_parser import OutputParser
from router.tools.parts import Content, Part, Reasoning


class OutputParts:
    """The output of one branch. Without `schemas` the model may call no tool."""

    def __init__(self, text: TextStream, tokenizer: AnyTokenizer, schemas: Mapping[str, Any] | None) -> None:
        """`text` must be a new one."""
        self._text = text
        self._parser = None if schemas is None else OutputParser(tool_format(tokenizer), schemas)
        self.finish = FinishReason.NONE
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_calls = 0

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
        if any(isinstance(part, Reasoning) for part in parts):
            self.num_reasoning_tokens = self.num_tokens
        self.num_calls += sum(not isinstance(part, (Content, Reasoning)) for part in parts)
        return parts
