"""Counts how often a branch has used each token, for penalties, without counting all tokens at each step."""

import numpy as np
from numpy.typing import NDArray

from gpu_worker.scheduling.state.sequence import Branch


class TokenHistory:
    """The distinct tokens of one branch and how often each occurs in its output.

    The counts are a pure function of the branch's tokens. `update` compares the tokens it has counted with the branch's
    and counts all of them again where they differ, so forks, replays and rollbacks need no call of their own.
    """

    def __init__(self, branch: Branch, vocab_size: int, *, with_prompt: bool) -> None:
        self.branch = branch
        self._vocab_size = vocab_size
        self._start = 0 if with_prompt else branch.num_prompt
        self._counted: list[int] = []
        self._clear()

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each token occurs in the output; 0 for a token that only the prompt has."""
        return self._counts[: len(self._places)]

    def update(self) -> None:
        """Counts the tokens that are new since the last call, or all tokens if the counted ones have changed."""
        tokens = self.branch.tokens[self._start :]
        known = len(self._counted)
        if tokens[:known] != self._counted:
            self._clear()
            known = 0
        first_output = self.branch.num_prompt - self._start
        for position in range(known, len(tokens)):
            self._add(tokens[position], int(position >= first_output))
        self._counted = tokens

    def _clear(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.int64)

    def _add(self, token: int, occurrences: int) -> None:
        if not 0 <= token < self._vocab_size:
            return
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += occurrences
