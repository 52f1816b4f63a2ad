"""The progress bar of a call of LLM."""

import time

from tqdm import tqdm


class ProgressBar:
    """The bar of prompts, with the tokens per second beside it."""

    def __init__(self, bar: tqdm) -> None:
        self.num_tokens = 0
        self._bar = bar
        self._began = time.perf_counter()
        self._shown = self._began

    def show(self) -> None:
        """Writes the rate, at most ten times a second."""
        now = time.perf_counter()
        if now - self._shown >= 0.1:
            self._shown = now
            self._bar.set_postfix_str(f"{self.num_tokens / (now - self._began):.1f} tokens/s")
