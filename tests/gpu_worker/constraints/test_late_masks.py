"""Masks that are computed beside the model: whoever looks waits, and a step ends when nothing of it is computed."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpu_worker.constraints.late_masks import LateMasks
from gpu_worker.steps.mask import Mask


def test_masks_are_waited_for_where_they_are_looked_at():
    may_end = threading.Event()

    mask = Mask.of(b"x")

    def work() -> dict[int, Mask]:
        may_end.wait(30)
        return {3: mask}

    with ThreadPoolExecutor(1) as executor:
        masks = LateMasks(executor, work)
        threading.Timer(0.05, may_end.set).start()
        assert (masks.get(3), masks.get(0), dict(masks), len(masks)) == (mask, None, {3: mask}, 1)


def test_what_goes_wrong_is_raised_where_masks_are_looked_at_and_not_at_the_end_of_a_step():
    def work() -> dict[int, Mask]:
        raise ValueError("no mask")

    with ThreadPoolExecutor(1) as executor:
        masks = LateMasks(executor, work)
        masks.wait()
        with pytest.raises(ValueError, match="no mask"):
            masks.get(0)
