"""An input is the same after its bytes, and any other bytes are refused."""

import struct
from array import array
from dataclasses import fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_worker.steps.mask import Mask
from gpu_worker.steps.pooling import PooledChunk
from gpu_worker.steps.seats import Seats
from gpu_worker.steps.step_input import (
    VERSION,
    InvalidStepInput,
    KnownTokens,
    OpenedSeat,
    StepInput,
    TableChange,
    ints,
    longs,
    params_from_bytes,
    params_to_bytes,
)
from octavo.pooling.params import PoolKind
from octavo.request.sampling import SamplingParams

small, large = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
many_ints, many_longs = st.lists(small, max_size=5).map(ints), st.lists(large, max_size=5).map(longs)
pairs = st.lists(st.tuples(small, small), max_size=3)
numbers, ids = st.floats(allow_nan=False), st.lists(large, max_size=3).map(tuple)
maybe = st.none() | st.integers(0, 100)
params = st.builds(
    SamplingParams,
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "length_penalty"), numbers),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "banned_token_ids"), ids),
    **dict.fromkeys(("max_tokens", "logprobs", "prompt_logprobs"), maybe),
    seed=st.none() | st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(large, numbers, max_size=3),
    banned_sequences=st.lists(ids, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    best_of=large,
)
sums = st.lists(st.floats(allow_nan=False), max_size=5).map(lambda numbers: array("d", numbers))
inputs = st.builds(
    StepInput,
    large,
    **dict.fromkeys(("swap_out", "swap_in", "copies", "demotions"), pairs),
    **dict.fromkeys(("left", "seats", "lengths", "ends"), many_ints),
    **dict.fromkeys(("sample_tokens", "sample_seats", "sample_branches"), many_ints),
    **dict.fromkeys(("tokens", "positions", "slots"), many_longs),
    spoil=st.lists(small, max_size=3),
    timed=st.booleans(),
    num_decodes=large,
    num_drafted=large,
    masks=st.dictionaries(small, st.binary(max_size=5).map(Mask.of), max_size=3),
    opened=st.lists(
        st.builds(
            *(OpenedSeat, small, params, small, many_longs, st.binary(max_size=33), small),
            num_encoded=small,
            encoded=many_longs,
        ),
        max_size=2,
    ),
    tables=st.lists(st.builds(TableChange, small, small, many_ints), max_size=3),
    scored=st.lists(st.builds(KnownTokens, small, small, many_longs), max_size=3),
    pooled=st.lists(st.builds(PooledChunk, small, st.sampled_from(PoolKind), many_ints, sums), max_size=3),
)


@given(inputs)
def test_an_input_is_the_same_after_its_bytes(step):
    data = step.to_bytes()
    assert len(data) % 8 == 0
    assert StepInput.from_bytes(data) == step


@given(inputs, st.data())
def test_bytes_that_are_not_an_input_are_refused(step, data):
    """Cut off, with more behind, of another version, with a bit flipped."""
    whole = step.to_bytes()
    assert StepInput.from_bytes(memoryview(whole)) == step
    cut = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    next_version = whole[:4] + struct.pack("=I", VERSION + 1) + whole[8:]
    for wrong in (whole[:cut], whole + bytes(8), next_version, bytes(flipped), data.draw(st.binary(max_size=99))):
        with pytest.raises(InvalidStepInput):
            StepInput.from_bytes(wrong)


@example(SamplingParams(length_penalty=2.0**63, seed=2**64 - 1))
@given(params)
def test_parameters_keep_all_but_their_texts(params):
    texts = SamplingParams(**{f.name: getattr(params, f.name) for f in fields(params)} | {"stop": ("\n",)})
    assert params_from_bytes(params_to_bytes(texts)) == params


def test_adapters_are_refused():
    opened = [OpenedSeat(0, SamplingParams(), 1, longs(), adapter=1)]
    with pytest.raises(ValueError, match="this runner has no adapters"):
        Seats().update(StepInput(1, opened=opened))
