"""Which tokens may come where text stands between tokens of times: the rules of Whisper's own timestamps.

They follow from the output so far and from the logits of the next token, so it does not matter where a sequence is
continued.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MOST_AT_FIRST = 50  # of 0.02 s: Whisper's own, where generation_config.json does not say it


class TimeRules:
    """Times come in pairs, with text between the pairs; none is before the one before it."""

    def __init__(self, first: int, end: int, most_at_first: int) -> None:
        """`first`: the token of the time 0, which all of times follow. `end`: that which ends an output."""
        self._first = first
        self._end = end
        self._most_at_first = most_at_first

    def confine(self, logits: Tensor, output: Sequence[int]) -> None:
        """Refuses in this row of logits what may not come after the output."""
        first = self._first
        logits[first - 1] = -torch.inf  # text without times does not begin here
        times = [token for token in output if token >= first]
        if not output:
            logits[:first] = -torch.inf
            logits[first + self._most_at_first + 1 :] = -torch.inf
        elif output[-1] < first:  # text, after which a time is later than the one before the text
            logits[first : times[-1] + 1 if times else first] = -torch.inf
        elif len(output) < 2 or output[-2] >= first:  # a pair, or the first time of all: text begins
            logits[first:] = -torch.inf
        else:  # the end of a text: the next one begins now or later, or there is none
            logits[: self._end] = -torch.inf
            logits[first : times[-1]] = -torch.inf
        if float(logits[first:].double().logsumexp(0)) > float(logits[:first].max()):
            logits[:first] = -torch.inf  # a time is likelier than each text, whichever time it is
