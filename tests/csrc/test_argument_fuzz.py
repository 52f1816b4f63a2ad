"""Whatever is wrong with an argument, an op says so by its name and touches no memory.

Ops are found by introspection: a new one without a call in support/op_calls.py fails here.
"""

import ctypes
import mmap
import random
import re

import pytest
import torch
from op_calls import CALLS, Fence, good_call, signatures
from torch import Tensor

from gpu_worker.ops import native

ROUNDS = {False: 120, True: 30}  # of each op; with sanitizers
INTS = [-(2**63), -(2**31), -2, -1, 0, 1, 3, 99, 2**31 - 1, 2**31, 2**45, 2**61, 2**63 - 1]
FLOATS = [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e30]
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float64]
built = native.load()
each_op = pytest.mark.parametrize("name", sorted(signatures(built)) if built else [])


def tensors(call):
    return [name for name, value in call.arguments.items() if isinstance(value, Tensor)]


def refuse(module, name, names, spoil, how=""):
    """A call whose arguments `spoil` has changed is refused for one of `names`, and nothing has happened."""
    fence = Fence()  # one for all would be looked at whole each time
    call = good_call(module, name, fence)
    spoil(call.arguments)
    try:
        with pytest.raises(module.ArgumentError, match=rf"^({'|'.join(names)}): "):
            call()
        assert fence.is_whole([])
    except BaseException as error:
        error.add_note(f"{names}: {how}")
        raise


def never_good(x):
    """What can be no argument of any op, instead of the tensor x."""
    found = {
        "no tensor": 3,
        "elsewhere": x.to("meta"),
        "float64": x.double(),
        "bool": x.bool(),
        "complex": x.to(torch.complex64),
        "sparse": x.float().to_sparse(),
        "seven dimensions": x.reshape(*[1] * (7 - x.ndim), *x.shape),
        "huge": x.reshape(-1)[:1].reshape([1] * x.ndim).expand(2**52, *[1] * (x.ndim - 1)),
    }
    if x.shape[-1] > 1:
        found["not contiguous"] = torch.stack([x, x], -1)[..., 0]
    return found


def shifted(x, y):
    """Copies of both whose memory overlaps in part."""
    sizes = [each.numel() * each.element_size() for each in (x, y)]
    begin = sizes[0] // 2 // 8 * 8
    buffer = torch.zeros(max(sizes[0], begin + sizes[1]) + 8, dtype=torch.uint8)
    one = buffer[: sizes[0]].view(x.dtype).view(x.shape).copy_(x)
    other = buffer[begin : begin + sizes[1]].view(y.dtype).view(y.shape).copy_(y)
    return one, other, buffer


@each_op
def test_a_good_call_writes_its_outputs_alone_and_reads_what_is_read_only(either, name):
    for n in range(3):
        fence = Fence()
        call = good_call(either, name, fence, n)
        call()
        assert fence.is_whole(call.written()), n
    call, libc, places = good_call(either, name, Fence()), ctypes.CDLL(None, use_errno=True), []
    for each in set(tensors(call)) - set(call.outputs):
        x = call.arguments[each]
        page = mmap.mmap(-1, max(1, x.numel() * x.element_size()))
        call.arguments[each] = torch.frombuffer(page, dtype=x.dtype)[: x.numel()].view(x.shape).copy_(x)
        places.append(ctypes.c_void_p(call.arguments[each].data_ptr()))
    size = ctypes.c_size_t(mmap.PAGESIZE)
    assert not any(libc.mprotect(place, size, mmap.PROT_READ) for place in places)
    call()
    assert not any(libc.mprotect(place, size, mmap.PROT_READ | mmap.PROT_WRITE) for place in places)


@each_op
def test_what_no_op_takes_is_refused_by_name(either, name):
    call = good_call(either, name, Fence())
    for argument in tensors(call):
        for how, value in never_good(call.arguments[argument]).items():
            refuse(either, name, [argument], lambda given, a=argument, v=value: given.update({a: v}), how)


@each_op
def test_an_output_overlaps_nothing(either, name):
    call = good_call(either, name, Fence())
    for output in call.outputs:
        x = call.arguments[output]
        if x.ndim > 1:
            refuse(either, name, [output], lambda given, o=output, x=x: given.update({o: x[:1].expand_as(x)}))
        for argument in set(tensors(call)) - {output}:
            one, other, buffer = shifted(x, call.arguments[argument])
            before, both = buffer.clone(), {output: one, argument: other}
            refuse(either, name, [output, argument], lambda given, both=both: given.update(both))
            assert torch.equal(buffer, before)


def spoil(x, dice):
    """Something else instead of an argument; good by chance."""
    if isinstance(x, bool):
        return not x
    if isinstance(x, int):
        return dice.choice(INTS)
    if isinstance(x, float):
        return dice.choice(FLOATS)
    if isinstance(x, str):
        return dice.choice(["", "q5", "f32", "q4", "q8"])
    if isinstance(x, dict):
        key = dice.choice([*x, "nothing of the kind"])
        return {**x, key: spoil(x[key], dice) if key in x else 1}
    if isinstance(x, tuple):
        place = dice.randrange(len(x))
        return (*x[:place], spoil(x[place], dice), *x[place + 1 :])
    if isinstance(x, list):
        return dice.choice([[], [3], x + x, [spoil(x[0], dice)]])
    return spoilt_tensor(x, dice) if isinstance(x, Tensor) else x


def spoilt_tensor(x, dice):
    dim = dice.randrange(x.ndim)
    how = dice.randrange(8)
    if how == 0:
        return dice.choice([None, *never_good(x).values()]) if x.numel() else None
    if how == 1:
        return x.to(dice.choice(TYPES))
    if how == 2:
        return torch.cat([x, x.narrow(dim, 0, min(1, x.shape[dim]))], dim)
    if how == 3:
        return x.narrow(dim, 0, dice.randrange(x.shape[dim] + 1))
    if how == 4:
        return x.unsqueeze(dim) if dice.random() < 0.5 else x.reshape(-1)
    if how == 5:
        return torch.empty(*(dice.choice([0, 2**20]) if i == dim else size for i, size in enumerate(x.shape[:-1])), 0)
    if x.numel():
        x = x.clone()
        value = dice.choice(FLOATS if x.is_floating_point() else INTS)
        bits = torch.iinfo(x.dtype).bits if not x.is_floating_point() else 0
        x.view(-1)[dice.randrange(x.numel())] = (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) if bits > 8 else 1
        if not bits:
            x.view(-1)[0] = value
    return x


@each_op
def test_random_mischief(either, name):
    dice = random.Random(f"mischief {name}")
    refused, rounds = 0, ROUNDS[bool(either.build_info()["sanitizers"])]
    for _ in range(rounds):
        fence, problem = Fence(), ""
        call = good_call(either, name, fence, dice.randrange(3))
        chosen = dice.sample(sorted(call.arguments), min(len(call.arguments), dice.choice([1, 1, 2, 3])))
        call.arguments |= {argument: spoil(call.arguments[argument], dice) for argument in chosen}
        try:
            call()
        except either.ArgumentError as error:
            problem = str(error)
            assert re.match(r"\w+: .", problem)
        except TypeError:  # pybind11's own, which lists the arguments
            problem = "TypeError"
        refused += bool(problem)
        assert fence.is_whole([] if problem else call.written())
    assert refused > rounds / 10


def test_rows_of_nothing_take_no_time(extension):
    rows = 2**45
    nothing = torch.empty(rows, 0)
    extension.rms_norm(nothing, nothing, torch.empty(0), 1e-5)
    extension.silu_and_mul(nothing, nothing)
    extension.rotary(nothing[..., None], None, nothing, nothing, 0)
    with pytest.raises(extension.ArgumentError, match=r"^arena: has empty blocks"):
        extension.checksum_blocks(torch.empty(1, dtype=torch.int64), torch.empty(rows, 4, 0), torch.tensor([0]))
    with pytest.raises(extension.ArgumentError, match=r"^rows: "):
        extension.packed_bytes("q8", 2**48, 32)
    with pytest.raises(extension.ArgumentError, match=r"^packed: "):  # its bytes are a multiple of 2**64
        extension.Weight(torch.empty(0, dtype=torch.uint8), "q8", 2**47, 2**22)


def test_there_is_a_call_of_everything(extension):
    assert set(signatures(extension)) == set(CALLS)
