"""Counts the pictures that were read for prompts, and those that were refused, by the reason."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.metrics.value import MetricValue
from octavo.request.errors import ServingError

SOURCES = ("sent", "fetched")
# Why one is refused: the model takes none; there are too many; its host is not listed; the host does not give it; it is
# no data URL of base64, or has too many bytes; its reader refuses it; or the chat template does not show it.
REASONS = ("model", "count", "host", "fetch", "data", "file", "template")


class PictureTally:
    def __init__(self) -> None:
        self.read: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    @contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        """Counts what is refused within as refused for this reason."""
        try:
            yield
        except ServingError:
            self.refused[reason] += 1
            raise

    def values(self) -> Iterator[MetricValue]:
        """A source of metric values."""
        for source in SOURCES:
            yield MetricValue("octavo_pictures_read_total", self.read[source], (source,))
        for reason in REASONS:
            yield MetricValue("octavo_pictures_refused_total", self.refused[reason], (reason,))
