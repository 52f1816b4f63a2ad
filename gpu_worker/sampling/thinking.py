"""Whether a branch thinks, and which token must come because its budget is spent."""

import copy

from gpu_worker.steps.seats import Seat


class ThinkingState:
    """Where a branch has begun to think last: a function of its tokens, so that a replay comes to the same."""

    def __init__(self, branch: Seat) -> None:
        params = branch.params
        self.branch = branch
        self._start, self._end = list(params.thinking_start_ids), list(params.thinking_end_ids)
        self._budget = params.thinking_budget
        # Without a mark at its beginning, thinking begins with the output, and marks in the prompt say nothing.
        self._num_seen = 0 if self._start else branch.num_prompt
        self._began = None if self._start else branch.num_prompt  # the index of the first token after the mark

    def of_longer(self, branch: Seat) -> "ThinkingState":
        """The state of a branch that has the tokens of this one, and drafts after them."""
        longer = copy.copy(self)
        longer.branch = branch
        return longer

    def forced(self) -> int | None:
        """The token of the end mark that must come next; None if any token may come."""
        self._update()
        tokens = self.branch.tokens
        if self._began is None or self._budget is None or not self._end:
            return None
        if len(tokens) - max(self._began, self.branch.num_prompt) < self._budget:
            return None
        for length in range(len(self._end) - 1, 0, -1):
            if tokens[-length:] == self._end[:length]:
                return self._end[length]
        return self._end[0]

    def _update(self) -> None:
        tokens = self.branch.tokens
        for index in range(self._num_seen, len(tokens)):
            token, num_before = tokens[index], index + 1
            if self._start and token == self._start[-1] and _ends(tokens, num_before, self._start):
                self._began = num_before
            elif self._end and token == self._end[-1] and _ends(tokens, num_before, self._end):
                self._began = None
        self._num_seen = len(tokens)


def _ends(tokens: list[int], length: int, mark: list[int]) -> bool:
    return length >= len(mark) and tokens[length - len(mark) : length] == mark
