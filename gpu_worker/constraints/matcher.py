"""Where a branch is in the grammar of its constraint, and so which tokens may come next.

A matcher is a function of the grammar and the branch's output, and no more: it catches up on tokens when a mask is
asked for. So nothing of it is journalled or sent, and a branch that was taken, moved, forked or preempted needs nothing
else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpu_worker.steps.mask import Mask
from octavo.request.errors import ConstraintDiverged, ConstraintUnmet, Failure


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar of a model."""

    start: Any  # llguidance.LLMatcher, before any token
    mask_bytes: int

    def matcher(self) -> "Matcher":
        """A matcher for the output of one branch."""
        return Matcher(self.start.deep_copy(), self.mask_bytes)


class _Foreseen(NamedTuple):
    after: int  # how many tokens
    forced: list[int]
    masks: list[Mask]  # after each of those


class Matcher:
    """One branch's. Not thread-safe."""

    def __init__(self, matcher: Any, mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._num_matched = 0
        self._failure: Failure | None = None
        self._foreseen: _Foreseen | None = None

    def mask(self, tokens: Sequence[int], num_prompt: int, room: Mask | None = None, *, foresee: int = 0) -> Mask:
        """The tokens that may come after a branch's tokens, written into `room`. None are left after a failure.

        `foresee`: how many tokens beyond the next one `foreseen` is to know of, once that is there.
        """
        room = room or self._room()
        if self._catch_up(tokens, num_prompt):
            self._matcher.unsafe_compute_mask_ptr(room.address, room.size)
            if self._matcher.is_error():
                self._too_complex()
        if self._failure is not None:
            room.write(bytes(room.size))
        elif foresee and len(forced := self._matcher.compute_ff_tokens()[: 1 + foresee]) > 1:
            self._foreseen = _Foreseen(self._num_matched, forced, self._masks_after(forced))
        return room

    @property
    def has_foreseen(self) -> bool:
        return self._foreseen is not None and self._foreseen.after == self._num_matched

    def foreseen(self, tokens: Sequence[int], num_prompt: int) -> tuple[list[int], list[Mask]]:
        """Like `forced`, with what `draft_masks` says of them, as far as `mask` has foreseen it."""
        seen = self._foreseen
        if seen is None or len(tokens) - num_prompt != seen.after + 1 or tokens[-1] != seen.forced[0]:
            return [], []
        return seen.forced[1 : len(seen.masks)], seen.masks[1:]

    def forced(self, tokens: Sequence[int], num_prompt: int) -> list[int]:
        """Tokens that must come after a branch's tokens, because no other ones may; perhaps not all of them."""
        return list(self._matcher.compute_ff_tokens()) if self._catch_up(tokens, num_prompt) else []

    def draft_masks(self, tokens: Sequence[int], num_prompt: int, drafts: Sequence[int]) -> list[Mask]:
        """What may come after a branch's tokens and each of the drafts. It ends before the first one that may not."""
        return self._masks_after(drafts) if self._catch_up(tokens, num_prompt) else []

    def _masks_after(self, drafts: Sequence[int]) -> list[Mask]:
        masks: list[Mask] = []
        ahead = self._matcher.deep_copy()
        for token in drafts:
            if ahead.try_consume_tokens([token]) != 1 or ahead.is_stopped():
                break
            mask = self._room()
            ahead.unsafe_compute_mask_ptr(mask.address, mask.size)
            if ahead.is_error():
                break
            masks.append(mask)
        return masks

    def failure_after(self, tokens: Sequence[int], num_prompt: int) -> Failure:
        """Why no token was left after a branch's tokens."""
        self._catch_up(tokens, num_prompt)
        if self._failure is not None:
            return self._failure
        return ConstraintUnmet(
            f"after {self._num_matched} tokens the constraint allows only tokens that other parameters forbid: "
            "banned_token_ids, banned_sequences, allowed_token_ids or min_tokens"
        ).failure()

    def _room(self) -> Mask:
        return Mask(bytearray(self._mask_bytes), self._mask_bytes)

    def _catch_up(self, tokens: Sequence[int], num_prompt: int) -> bool:
        """Takes in what is new of a branch's tokens. Returns whether the grammar accepts all of them."""
        if self._failure is not None:
            return False
        new = tokens[num_prompt + self._num_matched :]
        num = self._matcher.try_consume_tokens(list(new)) if new else 0
        self._num_matched += num
        if num < len(new) and self._matcher.is_error():
            self._too_complex()
        elif num < len(new):
            message = f"output token {self._num_matched + 1} is none that the constraint allows there"
            self._failure = ConstraintDiverged(message).failure()
        return self._failure is None

    def _too_complex(self) -> None:
        why = self._matcher.get_error().splitlines()[0][:200]
        message = f"after {self._num_matched} tokens the constraint became too complex: simplify it ({why})"
        self._failure = ConstraintUnmet(message).failure()
