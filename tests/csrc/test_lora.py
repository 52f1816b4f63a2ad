"""Adapters of a native decoder: what torch defines, for tokens in any order, and what is refused by its name."""

from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from instruction_sets import ISAS
from small_decoder import BLOCK_SIZE, BLOCKS, SIZES, Weights
from torch import Tensor

from gpu_worker.ops.lora import Lora, LoraPart, LoraRows, LoraStack, add_lora, in_tiles

TOKENS = 40
FIRSTS = {"qkv": ((0, 32), (32, 16), (48, 16)), "out": ((0, 32),), "gate_up": ((0, 32), (32, 32)), "down": ((0, 32),)}
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def weight(extension: ModuleType, tensor: Tensor) -> Any:
    return extension.Weight(tensor, NAMES[tensor.dtype], *tensor.shape)


def tiled(extension: ModuleType, b: Tensor) -> Any:
    rows, rank = b.shape
    return extension.Weight(in_tiles(b)[:, :rows], NAMES[b.dtype], rank, rows)


def adapter(
    extension: ModuleType, seed: int, rank: int, stacks: str = " ".join(FIRSTS), dtype: torch.dtype = torch.float32
) -> Lora:
    """One for the decoder of `Weights`, in both forms."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype) / 4

    layer, native = {}, {}
    for name in stacks.split():
        stack = matrix(rank * len(FIRSTS[name]), 32), tuple(LoraPart(matrix(n, rank), at) for at, n in FIRSTS[name])
        parts = tuple((tiled(extension, part.b), part.first) for part in stack[1])
        layer[name], native[name] = LoraStack(*stack), (weight(extension, stack[0]), parts)
    return Lora(f"{seed}", rank, 1.5, [layer], 0, extension.Lora(1.5, [native]))


def in_4_bits(extension: ModuleType, values: Tensor, inputs: str) -> Any:
    packed = torch.empty(extension.packed_bytes("q4", *values.shape), dtype=torch.uint8)
    extension.quantize(packed, values, "q4")
    return extension.Weight(packed, "q4", *values.shape, inputs)


class PackedWeights(Weights):
    """In 4 bits, whose products add what adapters do."""

    def __init__(self, extension: ModuleType, inputs: str) -> None:
        super().__init__(extension)
        self.inputs = inputs

    def matrix(self, rows: int, cols: int = 32) -> Any:
        return in_4_bits(self.extension, self.tensor(rows, cols), self.inputs)


class Model:
    def __init__(self, extension: ModuleType, inner: int = 32, inputs: str = "", gate_up: Any = None) -> None:
        """`inputs`: what those of products with 4 bits are rounded to; else weights are float32."""
        torch.manual_seed(1)
        self.inputs = inputs
        weights = PackedWeights(extension, inputs) if inputs else Weights(extension)
        arguments = weights.arguments() | {"sizes": SIZES | {"inner": inner}}
        mlp = {"gate_up": weights.stack(2 * inner), "down": (weights.matrix(32, inner),)}
        mlp |= {} if gate_up is None else {"gate_up": (gate_up,)}
        arguments["layers"] = [layer | mlp for layer in arguments["layers"]]
        self.llama = extension.Llama(**arguments)
        self.kv = extension.Kv([torch.zeros(BLOCKS, 1, 2, BLOCK_SIZE, 16)])

    def run(self, rows: Tensor | None, loras: tuple[Any, ...], count: int = 1, length: int = TOKENS) -> Tensor:
        """The states of a step of so many sequences of this length."""
        size, hidden = -(-length // BLOCK_SIZE), torch.empty(count * length, 32)
        positions, tables = torch.arange(length), torch.arange(count * size, dtype=torch.int32).view(count, size)
        slots = (BLOCK_SIZE * tables[:, :1].long() + positions).flatten()
        positions = positions.repeat(count)
        lens = torch.full((count,), length, dtype=torch.int32)
        cu_q = torch.arange(count + 1, dtype=torch.int32) * length
        batch = (positions * 7 + 3) % 16, positions, slots, cu_q, lens, tables, torch.arange(len(hidden))
        self.llama.forward(hidden, *batch, self.kv, rows, loras)
        return hidden


@pytest.fixture(params=[(isa, inputs) for isa in ISAS for inputs in ("", "8 bits", "15 bits")], ids=" ".join)
def model(request: pytest.FixtureRequest, extension: ModuleType) -> Iterator[Model]:
    """On each instruction set of the machine."""
    before, (isa, inputs) = extension.isa(), request.param
    if isa not in extension.isas():
        pytest.skip(f"this machine has no {isa}, or it was not built")
    extension.select_isa(isa)
    yield Model(extension, inputs=inputs)
    extension.select_isa(before)


def test_a_row_has_the_same_bits_beside_any_others(extension: ModuleType, model: Model) -> None:
    """Ten sequences of equal tokens, some with one adapter, some with another, in any order, and each alone."""
    loras = [adapter(extension, 1, 3), adapter(extension, 2, 16, "qkv down"), adapter(extension, 3, 8, "out gate_up")]
    each_alone = [(torch.arange(9), ((lora.native, 9),)) for lora in loras]
    alone = [model.run(*given, length=9) for given in [(None, ()), *each_alone]]
    assert len({tuple(states.flatten().tolist()) for states in alone}) == 4
    generator = torch.Generator().manual_seed(5)
    for _ in range(8):
        chosen = torch.randint(0, 4, (10,), generator=generator)
        owner, groups, rows = chosen.repeat_interleave(9), [], list[Tensor]()
        for number, lora in enumerate(loras, 1):
            own = (owner == number).nonzero().flatten()
            rows.append(own)
            groups += [(lora.native, len(own))] if len(own) else []
        together = model.run(torch.cat(rows) if groups else None, tuple(groups), 10, 9)
        for which, states in zip(chosen, together.split(9), strict=True):
            assert torch.equal(states, alone[which])


@pytest.mark.parametrize("dtype", NAMES)
def test_a_matrix_in_parts_of_any_size_gives_the_same_bits(
    extension: ModuleType, model: Model, dtype: torch.dtype
) -> None:
    """Of more rows than threads compute together, so that each has a share."""
    a, b = (torch.randn(shape).to(dtype) / 4 for shape in ((5, 32), (5, 320)))
    wide = Model(extension, 160, model.inputs)

    def states_of(stack: tuple[Any, ...], scale: float = 2.0) -> Tensor:
        return wide.run(torch.arange(TOKENS), ((extension.Lora(scale, [{"gate_up": stack}]), TOKENS),))

    def states(*cuts: int) -> Tensor:
        parts = [tiled(extension, b[:, first:end].T) for first, end in pairwise((0, *cuts, 320))]
        many = weight(extension, torch.cat([a] * len(parts)))
        return states_of((many, tuple(zip(parts, (0, *cuts), strict=True))))

    whole = states()
    assert not torch.equal(whole, wide.run(None, ()))
    for cuts in ((160,), (64, 128, 192, 256), (61,), (3,), (7, 8, 17, 63)):
        assert torch.equal(states(*cuts), whole)
    assert torch.equal(states_of((weight(extension, a), ((tiled(extension, b.T * 2), 0),)), 1.0), whole)
    ends = tiled(extension, b[:, :160].T), tiled(extension, b[:, 160:].T)
    both = weight(extension, torch.cat((torch.zeros_like(a), a))), ((ends[0], 0), (ends[1], 160))
    alone = weight(extension, a), ((ends[1], 160),)
    assert torch.equal(states_of(both), states_of(alone)), "each part has its own rows of a"


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("rank", [1, 2, 11, 16])
def test_products_with_an_adapter_are_those_of_a_changed_matrix(
    extension: ModuleType, model: Model, dtype: torch.dtype, rank: int
) -> None:
    """Of zeros, so that the adapter is all. Its parts share a tile, and the last one is not full."""
    a, b = (torch.randn(shape).to(dtype) / 4 for shape in ((2 * rank, 32), (150, rank)))
    parts = (tiled(extension, b), 7), (tiled(extension, b[:121]), 157)
    lora = extension.Lora(2.0, [{"gate_up": (weight(extension, a), parts)}])
    zeros = torch.zeros(320, 32)
    zero = in_4_bits(extension, zeros, model.inputs) if model.inputs else weight(extension, zeros)
    changed = zeros.clone()
    changed[7:157], changed[157:278] = 2 * b.float() @ a[:rank].float(), 2 * b[:121].float() @ a[rank:].float()
    every_third = torch.arange(0, TOKENS, 3)
    found = Model(extension, 160, gate_up=zero).run(every_third, ((lora, len(every_third)),))
    with_all = Model(extension, 160, gate_up=weight(extension, changed)).run(None, ())
    without = Model(extension, 160, gate_up=zero).run(None, ())
    assert torch.allclose(found[every_third], with_all[every_third], atol=1e-4)
    assert torch.equal(found[1::3], without[1::3])
    assert not torch.allclose(with_all, without, atol=1e-2)


def test_what_is_added_is_what_torch_adds(extension: ModuleType) -> None:
    """To the product of one matrix, without all that comes after: a decoder whose adapter changes `down` alone."""
    lora = adapter(extension, 4, 5, "down", torch.bfloat16)
    x, y = torch.randn(7, 32), torch.randn(7, 32)
    rows = LoraRows.of([(lora, [1, 2, 6])], torch.device("cpu"))
    found = add_lora(lambda values, matrix: values @ matrix.float().T, rows, 0, "down", x, y.clone())
    stack, expected = lora.layers[0]["down"], y.clone()
    expected[[1, 2, 6]] += 1.5 * (x[[1, 2, 6]] @ stack.a.float().T) @ stack.parts[0].b.float().T
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(found[[0, 3, 4, 5]], y[[0, 3, 4, 5]])


def test_what_is_wrong_is_refused_by_its_name(extension: ModuleType, model: Model) -> None:
    native = adapter(extension, 1, 4).native
    for rows, groups, words in (
        ((0, 1), ((native, 3),), "lora_rows"),
        ((0, 40), ((native, 2),), "lora_rows.*out of range"),
        ((0, -1), ((native, 2),), "lora_rows.*out of range"),
        ((3, 3), ((native, 2),), "lora_rows.*twice"),
        ((3, 4), ((native, 0),), "loras.*without rows"),
        (torch.tensor([3, 4]).int(), ((native, 2),), "lora_rows"),
        (None, ((native, 2),), "lora_rows"),
        ((1,), ((None, 1),), "loras.*no adapter"),
        ((1,), (native,), "loras.*no pair"),
    ):
        with pytest.raises(ValueError, match=words):
            model.run(torch.tensor(rows) if isinstance(rows, tuple) else rows, groups)
    a, b, five = (weight(extension, torch.randn(rows, 32)) for rows in (4, 4, 5))
    for layers, words in (
        ([{"out": (a, ((b, 1),))}], "out"),
        ([{"out": (a, ((b, 0), (b, 0)))}], "out"),
        ([{"out": (five, ((b, 0),))}], "out.*another shape"),
        ([{"qkv": (a, ((b, -1),))}], "qkv"),
        ([], "another number of layers"),
    ):
        with pytest.raises(ValueError, match=words):
            model.llama.check_lora(extension.Lora(1.0, layers))
    for wrong in ({"other": (a, ((b, 0),))}, {"out": a}, {"out": (a, [(b, 0)])}, {"out": (None, ())}):
        with pytest.raises(ValueError, match="layers"):
            extension.Lora(1.0, [wrong])


def test_instruction_sets_of_one_class_give_the_same_bits(extension: ModuleType) -> None:
    """As `least_equal` of gpu_worker/models/numerics.py has them, for cache and inputs in float32."""
    before, lora, found = extension.isa(), adapter(extension, 6, 7, dtype=torch.bfloat16), []
    for isa in {"avx2", "avx512", "avx512_bf16"} & set(extension.isas()):
        extension.select_isa(isa)
        found.append(Model(extension).run(torch.arange(TOKENS), ((lora.native, TOKENS),)))
    extension.select_isa(before)
    assert all(torch.equal(found[0], each) for each in found)
