"""Compiled grammars of a model's vocabulary, the latest of them kept."""

import asyncio
import threading
from collections import OrderedDict
from contextlib import suppress
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from gpu_worker.constraints.matcher import Grammar
from gpu_worker.steps.runner import RunnerInfo
from octavo.request.errors import InvalidArgument, Mismatch, NoTokenizer
from octavo.request.sampling import Constraint
from octavo.text import grammar
from octavo.text.tokenizers.tokenizer import AnyTokenizer, open_tokenizer

CACHE_BYTES = 64 << 20
# What a grammar takes, with one matcher: 130 KB where it is small, and 33 to 102 bytes for each byte of a large schema.
_BASE_BYTES = 128 << 10
_BYTES_PER_BYTE = 120
AT_ONCE = 2  # that are compiled at once


class Grammars:
    """Compiles constraints. Any thread."""

    def __init__(self, info: RunnerInfo, cache_bytes: int = CACHE_BYTES) -> None:
        self._info = info
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._room = asyncio.Semaphore(AT_ONCE)

    async def compiled(self, constraint: Constraint | None) -> Grammar | None:
        """The grammar of a constraint. Raises a ServingError if this worker cannot keep it."""
        if constraint is None:
            return None
        if (known := self._known(constraint)) is not None:
            return known
        async with self._room:
            return await asyncio.to_thread(self.compile, constraint)

    def compile(self, constraint: Constraint) -> Grammar:
        """Like `compiled`, on the caller's thread."""
        if (known := self._known(constraint)) is not None:
            return known
        if constraint.engine not in ("", grammar.engine()):
            raise Mismatch(f"the constraint was begun with {constraint.engine}; this worker has {grammar.engine()}")
        start = LLMatcher(self._open(), grammar.grammar_of(constraint), log_level=0, limits=grammar.limits())
        if start.is_error():
            raise InvalidArgument(f"constraint.{constraint.shape}", start.get_error().splitlines()[0])
        made = Grammar(start, -(-self._info.vocab_size // 32) * 4)
        self._keep(constraint, made)
        return made

    def warm_up(self) -> None:
        """Builds what all grammars share, so that no request waits for it: seconds, for a large vocabulary."""
        with suppress(Exception):  # the first constraint is told why it cannot be kept
            self._open()

    def _known(self, constraint: Constraint) -> Grammar | None:
        with self._lock:
            found = self._kept.get(constraint)
            if found is not None:
                self._kept.move_to_end(constraint)
            return found

    def _keep(self, constraint: Constraint, made: Grammar) -> None:
        with self._lock:
            if constraint not in self._kept:
                self._num_bytes += _size_of(constraint)
            self._kept[constraint] = made
            while self._num_bytes > self._cache_bytes and len(self._kept) > 1:
                self._num_bytes -= _size_of(self._kept.popitem(last=False)[0])

    def _open(self) -> LLTokenizer:
        info = self._info
        with self._opening:
            return _vocabulary_of(info.tokenizer, info.vocab_size, tuple(info.eos_token_ids))


def _size_of(constraint: Constraint) -> int:
    return _BASE_BYTES + _BYTES_PER_BYTE * len(constraint.text)


class _Vocabulary:
    """A tokenizer as llguidance wants it: the bytes of tokens, where a special token begins with 0xFF."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: AnyTokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.special_token_ids = sorted(getattr(tokenizer, "special_ids", ()))
        special = set(self.special_token_ids)
        self.tokens = [(b"\xff" if i in special else b"") + tokenizer.token_bytes(i) for i in range(vocab_size)]
        self._tokenizer = tokenizer
        self._num_begins = len(tokenizer.encode(""))
        self._by_bytes: dict[bytes, int] = {}
        for i in reversed(range(vocab_size)):
            if i not in special and self.tokens[i]:
                self._by_bytes[self.tokens[i]] = i
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a forced text: the tokenizer's, or the longest ones where those say another text."""
        ids, data = self._tokenizer.encode(text)[self._num_begins :], text.encode()
        if b"".join(map(self._tokenizer.token_bytes, ids)) == data:
            return ids
        found, place = [], 0
        while place < len(data):
            ends = range(min(len(data), place + self._longest), place, -1)
            end = next((end for end in ends if data[place:end] in self._by_bytes), 0)
            if not end:
                break  # no token has this byte
            found.append(self._by_bytes[data[place:end]])
            place = end
        return found


@lru_cache(maxsize=2)
def _vocabulary_of(name: str, vocab_size: int, end_ids: tuple[int, ...]) -> LLTokenizer:
    tokenizer = open_tokenizer(name)
    if not tokenizer.has_text:
        raise NoTokenizer("this worker's model has no tokenizer, so nothing constrains its output")
    ends = sorted(set(end_ids)) or sorted(tokenizer.eos_token_ids)
    if not ends:
        raise NoTokenizer("this worker's model names no end token (eos_token_id), so no constrained output could end")
    vocabulary: Any = _Vocabulary(tokenizer, vocab_size, ends[0])
    return LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=ends)
