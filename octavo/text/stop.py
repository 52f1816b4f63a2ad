"""Finds stop strings in a stream of text, and which token completes one.

A stop string ends the stream at the character that completes it. If one character completes several stop strings, the
longest counts. The end depends on the text alone, not on how the text is divided.
"""

import copy
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from octavo.request.errors import HistoryLost
from octavo.request.sampling import SamplingParams
from octavo.text.detokenizer import Detokenizer


class _Automaton:
    """A state machine that finds all stop strings in one pass (Aho-Corasick).

    A state stands for the longest end of the text that begins a stop string: so many characters may be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.matched = [""]  # by state: the longest stop string that ends there; empty: none
        self.held = [0]  # by state: length of the text's longest end that is a proper prefix of a stop string
        self._insert(stops)
        self._link()
        firsts = "".join(re.escape(char) for char in self.next[0])
        self.first = re.compile(f"[{firsts}]")  # only these characters leave the root

    def _insert(self, stops: Sequence[str]) -> None:
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self.next[state]:
                    self.next[state][char] = len(self.next)
                    self.next.append({})
                    self.fail.append(0)
                    self.matched.append("")
                    self.held.append(0)
                state = self.next[state][char]
            self.matched[state] = stop

    def _link(self) -> None:
        depth = 0
        level = [0]
        while level:
            below = []
            for state in level:
                self.held[state] = depth if self.next[state] else self.held[self.fail[state]]
                self.matched[state] = self.matched[state] or self.matched[self.fail[state]]
                for char, child in self.next[state].items():
                    self.fail[child] = self.step(self.fail[state], char) if state else 0
                    below.append(child)
            level, depth = below, depth + 1

    def step(self, state: int, char: str) -> int:
        while True:
            following = self.next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]


class StopMatcher:
    """Passes text on until a stop string is complete, and holds back the text that may become one.

    After a match `stopped` is true, `matched` is the stop string, and no more text comes out.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "matched", "stopped")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`stops` are stop strings, none of them empty. With `include` the stop string itself comes out, too."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self.stopped = False
        self.matched = ""
        self._include = include
        self._automaton = _Automaton(stops) if stops else None
        self._state = 0
        self._held = ""

    def push(self, text: str, armed: bool = True) -> str:
        """The text that no stop string can take back any more.

        Unless `armed`, a stop string that `text` completes is ordinary text.
        """
        if self.stopped:
            return ""
        automaton = self._automaton
        if automaton is None or (self._state == 0 and not automaton.first.search(text)):
            return text  # by far the most frequent case
        end = self._scan(automaton, text, armed)
        if end is not None:
            return self._stop(automaton.matched[self._state], self._held + text[:end])
        text = self._held + text
        cut = len(text) if self._include else len(text) - automaton.held[self._state]
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text held back, at the end of a stream without a stop string."""
        held, self._held = self._held, ""
        self._state = 0
        return held

    def _scan(self, automaton: _Automaton, text: str, armed: bool) -> int | None:
        """Follows the text to its end, or to the character that completes a stop string.

        Returns the position reached.
        """
        state, position, length = self._state, 0, len(text)
        end = None
        while position < length and end is None:
            if state == 0:
                found = automaton.first.search(text, position)
                if found is None:
                    break
                position = found.start()
            state = automaton.step(state, text[position])
            position += 1
            if armed and automaton.matched[state]:
                end = position
        self._state = state
        return end

    def _stop(self, matched: str, text: str) -> str:
        self.stopped = True
        self.matched = matched
        self._held = ""
        return text if self._include else text[: -len(matched)]


class TextDelta(NamedTuple):
    """The text that some tokens have added to a branch."""

    text: str
    num_tokens_used: int  # of all tokens so far, up to the one that completed a stop string
    stopped: bool  # a stop string is complete


class TextStream:
    """The text of one branch, a function of its tokens alone: any router can rebuild it from the journal.

    Only a stop string ends it. A stop string that is complete before `min_tokens` tokens is ordinary text. Tokens in
    `hidden_ids` are counted and have no text.
    """

    __slots__ = ("_detokenizer", "_has_stops", "_hidden_ids", "_matcher", "_min_tokens", "_num_tokens", "_skip_bytes")

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        hidden_ids: Collection[int] = (),
    ) -> None:
        """`detokenizer` must be a new one; it belongs to this stream."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include_stop)
        self._min_tokens = min_tokens
        self._hidden_ids = frozenset(hidden_ids)
        self._has_stops = bool(stops)
        self._num_tokens = 0
        self._skip_bytes = 0  # bytes of the text to come that were delivered before this stream was rebuilt

    @classmethod
    def of_branch(
        cls,
        detokenizer: Detokenizer,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        hidden_ids: Collection[int] = (),
    ) -> "TextStream":
        """The stream of a branch that is generated with `params`.

        A token that ends the branch has no text, unless `include_stop` asks for it. `skip_special_tokens` is a matter
        of the detokenizer, and hides a special token in any case. So do `hidden_ids`.
        """
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        return cls(
            detokenizer,
            stops=params.stop,
            include_stop=params.include_stop,
            min_tokens=params.min_tokens,
            hidden_ids={*hidden_ids, *(() if params.include_stop else ends)},
        )

    @property
    def matched(self) -> str:
        """The stop string that ended the stream; empty if none has."""
        return self._matcher.matched

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._matcher.stopped

    def fork(self) -> "TextStream":
        """A stream that goes on from here by itself, as a beam does that forks from another."""
        other = copy.copy(self)
        other._detokenizer, other._matcher = self._detokenizer.fork(), copy.copy(self._matcher)
        return other

    def push(self, ids: Sequence[int]) -> TextDelta:
        """The text that has become certain. No text comes after a stop string."""
        if self._has_stops:
            return self._delta(self._push_singly(ids))
        self._num_tokens += len(ids)
        if not self._hidden_ids.isdisjoint(ids):
            ids = [token_id for token_id in ids if token_id not in self._hidden_ids]
        return self._delta(self._detokenizer.push(ids))

    def finish(self) -> TextDelta:
        """The text held back, at the end of the branch. Raises HistoryLost if more than that was delivered."""
        text = ""
        if not self._matcher.stopped:
            text = self._matcher.push(self._detokenizer.flush(), self._num_tokens >= self._min_tokens)
            text += self._matcher.flush()
        delta = self._delta(text)
        if self._skip_bytes:
            raise HistoryLost(f"{self._skip_bytes} more bytes of text were delivered than the journal has")
        return delta

    def resume(self, ids: Sequence[int], delivered_bytes: int) -> TextDelta:
        """Rebuilds a new stream from all tokens of the branch so far; returns the text that was not delivered yet.

        `delivered_bytes` counts UTF-8 from the start of the branch. Raises HistoryLost if it ends within a character.
        """
        self._skip_bytes = delivered_bytes
        return self.push(ids)

    def _push_singly(self, ids: Sequence[int]) -> str:
        """Pushes token by token, to know which token completes a stop string."""
        detokenizer, matcher, hidden_ids = self._detokenizer, self._matcher, self._hidden_ids
        shown = ""
        for token_id in ids:
            if matcher.stopped:
                break
            self._num_tokens += 1
            if token_id not in hidden_ids and (text := detokenizer.push((token_id,))):
                shown += matcher.push(text, self._num_tokens >= self._min_tokens)
        return shown

    def _delta(self, text: str) -> TextDelta:
        if self._skip_bytes and text:
            text = self._skip(text)
        return TextDelta(text, self._num_tokens, self._matcher.stopped)

    def _skip(self, text: str) -> str:
        data = text.encode()
        skipped = min(self._skip_bytes, len(data))
        self._skip_bytes -= skipped
        try:
            return data[skipped:].decode()
        except UnicodeDecodeError:
            raise HistoryLost("the text delivered before ends within a character of the journal's text") from None
