"""Adapters of a native decoder: what torch defines, for tokens in any order, and what is refused by its name."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from instruction_sets import ISAS
from small_decoder import BLOCK_SIZE, BLOCKS, Weights
from torch import Tensor

from gpu_worker.ops.lora import Lora, LoraPart, LoraRows, LoraStack, add_lora

TOKENS = 40
FIRSTS = {"qkv": ((0, 32), (32, 16), (48, 16)), "out": ((0, 32),), "gate_up": ((0, 32), (32, 32)), "down": ((0, 32),)}


def adapter(extension: ModuleType, seed: int, rank: int, stacks: str = "qkv out gate_up down", **dtype: Any) -> Lora:
    """One for the decoder of `Weights`, in both forms."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype.get("dtype", torch.float32)) / 4

    def weight(tensor: Tensor) -> Any:
        return extension.Weight(tensor, {torch.float32: "f32", torch.bfloat16: "bf16"}[tensor.dtype], *tensor.shape)

    layer = {
        name: LoraStack(
            matrix(rank * len(FIRSTS[name]), 32), tuple(LoraPart(matrix(rows, rank), at) for at, rows in FIRSTS[name])
        )
        for name in stacks.split()
    }
    native = {
        n: (weight(s.a), tuple((weight(part.b.T.contiguous()), part.first) for part in s.parts))
        for n, s in layer.items()
    }
    return Lora(f"{seed}", rank, 1.5, [layer], 0, extension.Lora(1.5, [native]))


class Model:
    def __init__(self, extension: ModuleType) -> None:
        torch.manual_seed(1)
        self.llama = extension.Llama(**Weights(extension).arguments())
        self.kv = extension.Kv([torch.zeros(BLOCKS, 1, 2, BLOCK_SIZE, 16)])

    def run(self, rows: Tensor | None, loras: tuple[Any, ...], lengths: tuple[int, ...] = (TOKENS,)) -> Tensor:
        """The states of a step of sequences of these lengths."""
        total = sum(lengths)
        ends = [0, *accumulate(lengths)]
        positions = torch.cat([torch.arange(length) for length in lengths])
        sizes = [-(-length // BLOCK_SIZE) for length in lengths]
        firsts = [0, *accumulate(sizes)]
        tables = torch.zeros(len(lengths), max(sizes), dtype=torch.int32)
        slots = torch.empty(total, dtype=torch.int64)
        for i, (first, end) in enumerate(pairwise(ends)):
            tables[i, : sizes[i]] = torch.arange(firsts[i], firsts[i + 1])
            slots[first:end] = firsts[i] * BLOCK_SIZE + torch.arange(end - first)
        hidden = torch.empty(total, 32)
        cu_q, lens = torch.tensor(ends, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
        tokens = (positions * 7 + 3) % 16
        self.llama.forward(
            *(hidden, tokens, positions, slots, cu_q, lens, tables, torch.arange(total), self.kv, rows, loras)
        )
        return hidden


@pytest.fixture(params=ISAS)
def model(request: pytest.FixtureRequest, extension: ModuleType) -> Iterator[Model]:
    """On each instruction set of the machine."""
    before = extension.isa()
    if request.param not in extension.isas():
        pytest.skip(f"this machine has no {request.param}, or it was not built")
    extension.select_isa(request.param)
    yield Model(extension)
    extension.select_isa(before)


def test_a_row_has_the_same_bits_beside_any_others(extension: ModuleType, model: Model) -> None:
    """Ten sequences of equal tokens, some with one adapter, some with another, in any order, and each alone."""
    loras = [adapter(extension, 1, 3), adapter(extension, 2, 16, "qkv down"), adapter(extension, 3, 8, "out gate_up")]
    alone = [model.run(None, (), (9,))] + [model.run(torch.arange(9), ((lora.native, 9),), (9,)) for lora in loras]
    assert len({tuple(states.flatten().tolist()) for states in alone}) == 4
    generator = torch.Generator().manual_seed(5)
    for _ in range(8):
        chosen = torch.randint(0, 4, (10,), generator=generator).tolist()
        groups, rows = [], []
        for number, lora in enumerate(loras, 1):
            own = [9 * place + i for place, which in enumerate(chosen) if which == number for i in range(9)]
            rows += own
            groups += [(lora.native, len(own))] if own else []
        together = model.run(torch.tensor(rows, dtype=torch.int64) if rows else None, tuple(groups), (9,) * 10)
        for which, states in zip(chosen, together.split(9), strict=True):
            assert torch.equal(states, alone[which])


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "f32"), (torch.float16, "f16"), (torch.bfloat16, "bf16")])
def test_a_matrix_in_parts_of_any_size_gives_the_same_bits(
    extension: ModuleType, model: Model, dtype: torch.dtype, name: str
) -> None:
    a, b = (torch.randn(shape).to(dtype) / 4 for shape in ((5, 32), (5, 64)))

    def states(*cuts: int) -> Tensor:
        parts = [b[:, first:end].contiguous() for first, end in pairwise((0, *cuts, 64))]
        many = torch.cat([a] * len(parts))
        weights = [extension.Weight(part, name, *part.shape) for part in parts]
        stack = extension.Weight(many, name, *many.shape), tuple(zip(weights, (0, *cuts), strict=True))
        return model.run(torch.arange(TOKENS), ((extension.Lora(2.0, [{"gate_up": stack}]), TOKENS),))

    whole = states()
    assert not torch.equal(whole, model.run(None, ()))
    for cuts in ((32,), (61,), (3,), (7, 8, 17, 63)):
        assert torch.equal(states(*cuts), whole)


def test_what_is_added_is_what_torch_adds(extension: ModuleType) -> None:
    """To the product of one matrix, without all that comes after: a decoder whose adapter changes `down` alone."""
    lora = adapter(extension, 4, 5, "down", dtype=torch.bfloat16)
    x, y = torch.randn(7, 32), torch.randn(7, 32)
    rows = LoraRows.of([(lora, [1, 2, 6])], torch.device("cpu"))

    def linear(values: Tensor, weight: Tensor) -> Tensor:
        return values @ weight.float().T

    found = add_lora(linear, rows, 0, "down", x, y.clone())
    stack = lora.layers[0]["down"]
    expected = y.clone()
    expected[[1, 2, 6]] += 1.5 * (x[[1, 2, 6]] @ stack.a.float().T) @ stack.parts[0].b.float().T
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(found[[0, 3, 4, 5]], y[[0, 3, 4, 5]])


def test_what_is_wrong_is_refused_by_its_name(extension: ModuleType, model: Model) -> None:
    native = adapter(extension, 1, 4).native

    def longs(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    for rows, groups, words in (
        (longs(0, 1), ((native, 3),), "lora_rows"),
        (longs(0, 40), ((native, 2),), "lora_rows.*out of range"),
        (longs(0, -1), ((native, 2),), "lora_rows.*out of range"),
        (longs(3, 3), ((native, 2),), "lora_rows.*twice"),
        (longs(3, 4), ((native, 0),), "loras.*without rows"),
        (longs(3, 4).int(), ((native, 2),), "lora_rows"),
        (None, ((native, 2),), "lora_rows"),
        (longs(1), ((None, 1),), "loras.*no adapter"),
        (longs(1), (native,), "loras.*no pair"),
    ):
        with pytest.raises(ValueError, match=words):
            model.run(rows, groups)
    a, b = (extension.Weight(torch.randn(*shape), "f32", *shape) for shape in ((4, 32), (4, 32)))
    for stack, words in (
        ({"out": (a, ((b, 1),))}, "out"),
        ({"out": (a, ((b, 0), (b, 0)))}, "out"),
        ({"out": (extension.Weight(torch.randn(5, 32), "f32", 5, 32), ((b, 0),))}, "out.*another shape"),
        ({"qkv": (a, ((b, -1),))}, "qkv"),
    ):
        with pytest.raises(ValueError, match=words):
            model.llama.check_lora(extension.Lora(1.0, [stack]))
    with pytest.raises(ValueError, match="another number of layers"):
        model.llama.check_lora(extension.Lora(1.0, []))
    for wrong in ({"other": (a, ((b, 0),))}, {"out": a}, {"out": (a, [(b, 0)])}, {"out": (None, ())}):
        with pytest.raises(ValueError, match="layers"):
            extension.Lora(1.0, [wrong])


def test_an_adapter_keeps_its_memory(extension: ModuleType) -> None:
    weights = Weights(extension)
    layers = [{"out": (weights.matrix(4), ((weights.matrix(4), 0),))}]
    lora = extension.Lora(1.0, layers)
    layers[0].clear()
    assert all(weights.alive())
    del lora
    assert not any(weights.alive())


def test_instruction_sets_of_one_class_give_the_same_bits(extension: ModuleType) -> None:
    """As `least_equal` of gpu_worker/models/numerics.py has them, for cache and inputs in float32."""
    before, lora = extension.isa(), adapter(extension, 6, 7, dtype=torch.bfloat16)
    found = []
    for isa in ("avx2", "avx512", "avx512_bf16"):
        if isa in extension.isas():
            extension.select_isa(isa)
            found.append(Model(extension).run(torch.arange(TOKENS), ((lora.native, TOKENS),)))
    extension.select_isa(before)
    assert all(torch.equal(found[0], each) for each in found)
