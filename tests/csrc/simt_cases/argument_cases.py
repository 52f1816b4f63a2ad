"""Whatever is wrong with an argument, an op says so by its name and touches no memory.

Ops are found by introspection: a new one without a call in cuda_calls.py fails here.
"""

from collections.abc import Callable, Iterator
from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import F32, I32, I64, U8, Array, ref
from cuda_calls import CALLS, Call, signatures

# Of one argument and another that must fit it, either may be named.
PAIRS = (
    {"kv_dtype", "kv_cache_dtype"},
    {"key_cache", "value_cache", "key", "query"},
    {"k_scale", "v_scale"},
    {"cos", "sin"},
    {"source", "target"},
)
BAD_NUMBERS: dict[str, list[Any]] = {
    "rows": [-1, 0, 7, 64],
    "rotated": [-2, 0, 7, 34, 2**31 - 2],
    "window": [-1],
    "soft_cap": [-1.0, float("nan"), float("inf")],
    "scale": [float("nan"), float("inf")],
    "group": [-64, 63],
    "begin": [-1, 41, 2**62],
    "max_seq_len": [-1, 2**31 - 1],
    "partition": [-1, 2**31 - 1],
    "tp_rank": [-1],
    "blocksparse_block_size": [0, -1],
    "blocksparse_local_blocks": [-1],
    "blocksparse_head_sliding_step": [2**31 - 1, -(2**31)],
    "kernel": ["", "decode"],
    "format": ["", "q8"],
    "kv_cache_dtype": ["", "fp16"],
    "kv_dtype": ["", "auto"],
}
BLAMED = {"partition": "exp_sums", "max_seq_len": "exp_sums", "begin": "staging"}  # what no longer fits them
# What is moved as bytes may be of any type, and have more dimensions; what is one run of numbers, any.
BYTES = {f"{op}_blocks": ("arena",) for op in ("gather", "scatter", "checksum")}
BYTES |= {
    "copy_blocks": ("source", "target"),
    "convert_fp8": ("source", "target"),
    "paged_attention": ("plan.partials",),
}
GARBAGE = [-(2**63), -(2**31), -2, -1, 0, 1, 3, 99, 2**31 - 1, 2**31, 2**45, 2**63 - 1]


problems: list[str] = []  # all of them are said together


def arguments_case(rng: Any) -> None:
    assert set(signatures()) == set(CALLS), "cuda_calls.py has no call of some op, or one that is no op"
    for make in CALLS.values():
        good_case(make(rng))
        for name in make(rng).tensors():
            tensor_case(make(rng), name)
        numbers_case(make(rng))
        overlap_case(make(rng))
    plan_arguments_case()
    assert not problems, "\n".join(problems)


def good_case(call: Call) -> None:
    """It is taken, its inputs stay as they are, and what it may do without, it does without."""
    assert changed(call, call) <= set(call.outputs), call.op
    if "positions" not in call.optional:  # without them, angles have other rows
        call(**dict.fromkeys(call.optional))
    assert native.take_fault() is None, call.op


def changed(call: Call, run: Callable[[], Any]) -> set[str]:
    """Which tensors of a call have other bytes after it."""
    before = {name: x.data.tobytes() for name, x in call.tensors().items()}
    run()
    return {name for name, x in call.tensors().items() if x.data.tobytes() != before[name]}


def refuse(call: Call, names: set[str], how: str, **spoilt: Any) -> None:
    said: list[str] = []
    wrong = changed(call, lambda: said.append(complaint(lambda: call(**spoilt))))
    if said[0].partition(": ")[0] not in names:
        problems.append(f"{call.op}: {how}: {said[0] or 'is taken'}")
        native.take_fault()
    problems.extend(f"{call.op}: {how}: {name} has changed" for name in wrong)


def complaint(call: Callable[[], Any]) -> str:
    """What an op says to its arguments; empty: nothing."""
    try:
        call()
    except native.ArgumentError as error:
        return str(error)
    return ""


def refusal(call: Callable[[], Any], what: str = "an op took a bad argument") -> str:
    """What an op says to a bad argument."""
    said = complaint(call)
    assert said, what
    return said


def blamed(name: str) -> set[str]:
    """Who may be named for it."""
    last = {name, name.rpartition(".")[2] if not name.startswith("plan.") else name, name.partition(".")[0]}
    return last.union(*(pair for pair in PAIRS if last & pair))


def tensor_case(call: Call, name: str) -> None:
    x = call.tensors()[name]
    for how, spoilt in never_good(x):
        if not (name in BYTES.get(call.op, ()) and how.startswith(("of type", "with a dimension more", "flat"))):
            refuse(call, blamed(name), f"{name} {how}", **{name: spoilt})
    if name not in call.optional:
        refuse(call, blamed(name), f"no {name}", **{name: None})
    for wrong in ((0, 0), (2, 7)):  # the host's memory, another device's
        native.runtime.place_memory(x.data.ctypes.data, x.data.nbytes, *wrong)
        refuse(call, {name, name.rpartition(".")[2], name.partition(".")[0]}, f"{name} elsewhere")
        native.runtime.place_memory(x.data.ctypes.data, x.data.nbytes, 3, 0)
    known = set(signatures()[call.op]).union(*map(blamed, call.arguments), [""])
    for dim in range(x.data.ndim):  # another size is refused, for whatever does not fit it, or it is a good one
        for other in (np.delete(x.data, -1, dim), np.concatenate((x.data, x.data.take([0], dim)), dim)):
            data = np.ascontiguousarray(other)
            said = complaint(lambda data=data: call(**{name: ref(data, x.dtype)}))
            assert said.partition(": ")[0] in known, f"{call.op}: {name} of {data.shape} is blamed on {said}"
            native.take_fault()  # fewer blocks than the good call names


def never_good(x: Array) -> Iterator[tuple[str, Any]]:
    """What can be no argument of any op, instead of x."""
    address, dtype, shape, strides = x.ref
    yield "without an address", (0, dtype, shape, strides)
    for other in {I32, I64, F32, U8} - {dtype}:
        if (other == F32) != (dtype == F32):
            yield f"of type {other}", (address, other, shape, strides)
    for other in (-1, 7, 99):
        yield f"of no type ({other})", (address, other, shape, strides)
    yield "with a dimension more", (address, dtype, (1, *shape), (0, *strides))
    yield "with seven dimensions", (address, dtype, (1,) * (7 - len(shape)) + shape, (0,) * (7 - len(shape)) + strides)
    if len(shape) > 1:
        yield "flat", (address, dtype, (x.data.size,), (1,))
    if shape[-1] > 1:
        yield "not contiguous", (address, dtype, shape, (*strides[:-1], 2))
        yield "backwards", (address, dtype, shape, (*strides[:-1], -1))
    for size in (2**31, 2**62, -1):
        yield f"with {size} rows", (address, dtype, (size, *shape[1:]), strides)
    if len(shape) > 1:
        yield "huge", (address, dtype, (2**31 - 1, 2**31 - 1, *shape[2:]), (0, 0, *strides[2:]))


def numbers_case(call: Call) -> None:
    for name, values in BAD_NUMBERS.items():
        for value in values if name in call.arguments else ():
            refuse(call, blamed(name) | {BLAMED.get(name, name)}, f"{name} = {value!r}", **{name: value})


def overlap_case(call: Call) -> None:
    """An output lies in no other argument, nor twice in one place."""
    for name in call.outputs:
        x = call.tensors()[name]
        if name in ("plan.counters", "plan.partials"):
            continue
        if x.data.ndim > 1 and len(x.data) > 1:
            address, dtype, shape, strides = x.ref
            refuse(call, blamed(name), f"{name} in one place", **{name: (address, dtype, shape, (0, *strides[1:]))})
        for other, y in call.tensors().items():
            if other == name or {name.rpartition(".")[2], other.rpartition(".")[2]} == {"key_cache", "value_cache"}:
                continue
            memory = np.zeros(x.data.nbytes + y.data.nbytes, dtype=np.uint8)
            begin = x.data.nbytes // 2 // 16 * 16
            placed = memory[begin : begin + y.data.nbytes].view(y.data.dtype).reshape(y.data.shape)
            placed[...] = y.data
            there = memory[: x.data.nbytes].view(x.data.dtype).reshape(x.data.shape)
            moved = {name: ref(there, x.dtype), other: ref(placed, y.dtype)}
            refuse(call, blamed(name) | blamed(other), f"{name} over {other}", **moved)


def plan_arguments_case() -> None:
    form = {"kv_heads": 2, "group": 2, "rows": 8, "num_slots": 4}
    more = {"window": 0, "fixed_piece": 0, "even_enough": 1.0}
    good = {"q_lens": [1, 2], "kv_lens": [9, 2], **form, **more}
    bad = {"q_lens": [[-1, 2], [1], [1, 3], [2**30, 2]], "kv_lens": [[-1, 2], [9], [9, 1], [2**31 - 1, 2]]}
    bad |= {name: [-1, 0, 2**31 - 1] for name in form}
    bad |= {"window": [-1], "fixed_piece": [-1, 2**31 - 1], "even_enough": [float("nan"), -1.0]}
    for name, values in bad.items():
        for value in values:
            message = refusal(lambda name=name, value=value: native.plan_attention(**good | {name: value}))
            assert message.partition(": ")[0] in {name, "q_lens", "kv_lens"}, (name, value, message)
    room = {"sequences": 2, "tokens": 3, **form, "fixed_piece": 64, "keys": 100}
    for name in room:
        message = refusal(lambda name=name: native.plan_capacity(**room | {name: -1}))
        assert message.startswith(f"{name}: "), (name, message)
    kernel = {"kernel": "simt", "dtype": F32, "kv_type": "auto", "head_dim": 64, "rows": 4}
    for name, value in {"kernel": "x", "dtype": I32, "kv_type": "x", "head_dim": 0, "rows": 0}.items():
        message = refusal(lambda name=name, value=value: native.attention_kernel(**kernel | {name: value}))
        assert message.partition(": ")[0] in {name, "kv_cache_dtype"}, (name, message)


def garbage_case(rng: Any) -> None:
    """Ids, lengths and numbers on the device may be anything: nothing outside the arguments is read or written."""
    names = list(CALLS)
    call = CALLS[names[int(rng.integers(len(names)))]](rng)
    chosen = [name for name in call.tensors() if name not in call.outputs or name == "plan.counters"]
    for name in rng.permutation(chosen)[: int(rng.integers(1, 4))]:
        spoil(rng, call.tensors()[str(name)])
    assert changed(call, call) <= set(call.outputs), call.op  # numbers on the device are not what it refuses
    native.take_fault()


def spoil(rng: Any, x: Array) -> None:
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(x.data.size))
        if x.data.dtype.kind == "f":
            most = float(np.finfo(x.data.dtype).max)
            x.data.flat[place] = rng.choice([np.nan, np.inf, -np.inf, -1.0, 0.0, min(1e30, most)])
        else:
            number = int(rng.choice(np.array(GARBAGE, dtype=object)))
            width = 8 * x.data.itemsize
            x.data.flat[place] = (number + 2 ** (width - 1)) % 2**width - 2 ** (width - 1) if width > 8 else 7
