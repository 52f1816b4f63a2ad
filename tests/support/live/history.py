"""The history checker: what a client saw, held against what docs/protocol.md promises about delivery."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from live.oracle import Expected

from octavo.client import Event, FinishReason


@dataclass
class History:
    """Every event of one stream, in the order it came; breaking a rule is an AssertionError at once."""

    starts: Sequence[int] = ()
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # of the call, and of each event, where they are noted
    ended: bool = False

    def add(self, event: Event) -> None:
        branch = event.branch
        assert not self.ended, f"an event after the terminal one: {event}"
        says_nothing = not (event.token_ids or event.text or event.finish_reason)
        # Another router repeats the end of a branch if it comes last of all: it carries the end of the stream.
        repeats_end = event.finished is not None and says_nothing
        assert branch not in self.finishes or repeats_end, f"branch {branch} had ended: {event}"
        tokens = self.tokens.setdefault(branch, [])
        expected = len(tokens) + (self.starts[branch] if branch < len(self.starts) else 0)
        assert event.first_index == expected, f"branch {branch}: index {event.first_index} where {expected} is due"
        tokens += event.token_ids
        self.texts[branch] = self.texts.get(branch, "") + event.text
        if event.finish_reason:
            self.finishes[branch] = event.finish_reason
        self.ended = event.finished is not None

    def check(self, expected: Iterable[Expected]) -> None:
        """The stream is complete, and says what an undisturbed run says."""
        assert self.ended, "no terminal event"
        for branch, output in enumerate(expected):
            assert tuple(self.tokens[branch]) == output.token_ids, f"branch {branch}: other tokens"
            assert self.texts[branch] == output.text, f"branch {branch}: another text"
            assert self.finishes[branch] == output.finish_reason, f"branch {branch}: ended otherwise"
