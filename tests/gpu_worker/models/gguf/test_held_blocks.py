"""Blocks that another type holds: the same numbers, of any bytes."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.models.gguf.held_blocks import held_blocks
from octavo.model_files.gguf_support import HELD_AS


@pytest.mark.parametrize("kind", HELD_AS, ids=lambda kind: kind.name)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40))
def test_held_numbers_are_equal(kind, seed, rows):
    """Also of scales that are zero, steps that are no numbers, and several pieces."""
    rng = np.random.default_rng(seed)
    stored = rng.integers(0, 256, (8 * rows, kind.num_bytes), dtype=np.uint8)
    held = HELD_AS[kind]
    with np.errstate(all="ignore"):
        expected = dequantize(stored, GGMLQuantizationType(kind))
        blocks = held_blocks(memoryview(stored).cast("B"), kind).numpy().reshape(-1, held.num_bytes)
        np.testing.assert_array_equal(dequantize(blocks, GGMLQuantizationType(held)).reshape(-1), expected.reshape(-1))
