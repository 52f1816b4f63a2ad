"""Masks that are computed beside the model: a step begins with them on their way, and its sampler waits for them."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from gpu_worker.steps.mask import Mask

Work = Callable[[], Mapping[int, Mask]]


class LateMasks(Mapping[int, Mask]):
    """The masks of one step, by sample. Whoever looks at one waits until all are there, and gets what went wrong."""

    def __init__(self, executor: ThreadPoolExecutor, work: Work) -> None:
        self._found = executor.submit(work)

    def __getitem__(self, sample: int) -> Mask:
        return self._found.result()[sample]

    def __iter__(self) -> Iterator[int]:
        return iter(self._found.result())

    def __len__(self) -> int:
        return len(self._found.result())

    def wait(self) -> None:
        """Waits until all are there, or cannot be."""
        self._found.exception()
