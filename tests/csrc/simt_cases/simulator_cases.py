"""What the host may not rely on: when streams run, and that calls succeed. And probes."""

from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import F32, I32, I64, ref
from swap_cases import ALWAYS_ENGINE, ALWAYS_KERNEL


def streams_case(rng: Any) -> None:
    """A swap begins after what was queued on one stream, and another stream waits for it; others go on beside them."""
    runtime = native.runtime
    streams = [0, runtime.make_stream(), runtime.make_stream()]
    runtime.hold_null_stream(True)
    swapper = native.Swapper()
    try:
        for _ in range(3):
            before, after, beside = (streams[i] for i in rng.permutation(3))
            small = int(rng.choice([ALWAYS_ENGINE, ALWAYS_KERNEL]))
            arenas = [rng.normal(0, 1, (2, 20, 3, 8)).astype(np.float32) for _ in range(5)]
            first, second, third, fourth, fifth = arenas
            pairs, ids = np.stack([rng.permutation(20) for _ in range(2)], 1), rng.permutation(20)
            moved = [(int(a), int(b)) for a, b in zip(rng.permutation(20), rng.permutation(20), strict=True)]
            want = first.copy()[:, [a for _, a in sorted((int(b), int(a)) for a, b in pairs)]]
            want = want[:, [a for _, a in sorted((b, a) for a, b in moved)]][:, ids].swapaxes(0, 1).copy()
            staging = np.zeros((20, 2, 3 * 8 * 4), dtype=np.uint8)
            native.copy_blocks(ref(fourth, F32), ref(fifth, F32), ref(pairs, I64), beside)
            native.copy_blocks(ref(first, F32), ref(second, F32), ref(pairs, I64), before)
            ticket = swapper.start(ref(second, F32), ref(third, F32), moved, before, small)
            swapper.let_wait(ticket, after)
            native.gather_blocks(ref(staging, 3), ref(third, F32), ref(ids, I64), 0, after)
            runtime.synchronize(after)
            assert (staging.view(np.float32).reshape(want.shape) == want).all(), (before, after, small)
            runtime.synchronize(beside)
            assert (fifth[:, pairs[:, 1]] == fourth[:, pairs[:, 0]]).all()
    finally:
        runtime.hold_null_stream(False)
        for stream in streams[1:]:
            runtime.end_stream(stream)


def errors_case(rng: Any) -> None:
    """An error is told once and left to nobody. On a lost device every call says so, and all is given back."""
    x, weight, out = (np.ones(shape, dtype=np.float32) for shape in ((2, 64), 64, (2, 64)))
    blocks = np.zeros((1, 4, 2, 8), dtype=np.float32)
    lived = native.runtime.live()

    def norm() -> None:
        native.rms_norm(ref(out, F32), ref(x, F32), ref(weight, F32), 1e-5, 0)

    native.runtime.fail_after(0)
    assert told(norm) == "launch: out of memory"
    assert native.runtime.last_error() == 0, "the error of a launch is left behind"
    norm()
    swaps(ref(blocks, F32), norm)
    native.runtime.lose_device(False)
    assert native.runtime.live() == lived


def swaps(arena: Any, norm: Any) -> None:
    swapper = native.Swapper()
    for _ in range(4):
        ticket = swapper.start(arena, arena, [(0, 1)], 0, ALWAYS_ENGINE)
        while not swapper.done(ticket):  # "not ready" is an error, too
            assert native.runtime.last_error() == 0, "the state of an event is left behind"
    lost = swapper.start(arena, arena, [(2, 3)], 0, ALWAYS_ENGINE)
    native.runtime.lose_device(True)
    for call in (norm, norm, lambda: swapper.done(lost), lambda: swapper.wait(lost)):
        message = told(call)
        assert "unspecified launch failure" in message or "cannot be used" in message, message


def told(call: Any) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:  # ValueError: memory that cannot be looked up
        return str(error)
    raise AssertionError("a call that fails succeeded")


def probes_case(rng: Any) -> None:
    pieces = int(rng.integers(1, 9))
    x = rng.integers(-100, 100, (pieces, 128)).astype(np.float32)
    out = np.full(128, np.nan, dtype=np.float32)
    native.runtime.ring_probe(ref(out, F32), ref(x, F32), 0)
    assert (out == x.sum(0)).all(), "copies in bulk"
    blocks = int(rng.integers(2, 6))
    x = rng.integers(-100, 100, 32 * blocks).astype(np.float32)
    room, counter, total = np.full_like(x, np.nan), np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32)
    native.runtime.last_block_probe(ref(total, F32), ref(x, F32), ref(room, F32), ref(counter, I32), 0)
    assert total[0] == x.sum(), "the block that comes last"
