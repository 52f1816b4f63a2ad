"""Counts how often a branch has used each token, for penalties, without counting all tokens at each step."""

import numpy as np
from numpy.typing import NDArray

from gpu_worker.steps.seats import Seat


class TokenHistory:
    """The distinct tokens of one branch and how often each occurs in its output."""

    def __init__(self, branch: Seat, vocab_size: int, *, with_prompt: bool) -> None:
        self.branch = branch
        self._vocab_size = vocab_size
        self._end = 0 if with_prompt else branch.num_prompt  # of the tokens that have been counted
        self._places: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.int64)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each token occurs in the output; 0 for a token that only the prompt has."""
        return self._counts[: len(self._places)]

    def update(self) -> None:
        """Counts the tokens that have been added since the last call."""
        tokens, num_prompt = self.branch.tokens, self.branch.num_prompt
        for position in range(self._end, len(tokens)):
            self._add(tokens[position], int(position >= num_prompt))
        self._end = len(tokens)

    def _add(self, token: int, occurrences: int) -> None:
        if not 0 <= token < self._vocab_size:
            return
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += occurrences
