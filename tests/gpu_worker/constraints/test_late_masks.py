"""Masks that are computed beside the model: whoever looks waits, and a step ends when nothing of it is computed."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpu_worker.constraints.late_masks import LateMasks
from gpu_worker.steps.mask import Mask


def test_masks_are_waited_for_where_they_are_looked_at_and_so_is_what_goes_wrong():
    may_end, mask = threading.Event(), Mask.of(b"x")

    def fail() -> dict[int, Mask]:
        raise ValueError("no mask")

    with ThreadPoolExecutor(1) as executor:
        masks = LateMasks(executor, lambda: may_end.wait(30) and {3: mask})
        threading.Timer(0.05, may_end.set).start()
        assert (masks.get(3), masks.get(0), dict(masks), len(masks)) == (mask, None, {3: mask}, 1)
        masks = LateMasks(executor, fail)
        masks.wait()  # the end of a step
        with pytest.raises(ValueError, match="no mask"):
            masks.get(0)
