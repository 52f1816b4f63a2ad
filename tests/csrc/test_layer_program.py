"""Operations of programs of layers, beside what torch computes in float64; and what a program refuses."""

import pytest
import torch
from differences import difference
from instruction_sets import KERNELS
from torch import Tensor
from torch.nn import functional

STATES = (-1, 0, 0, 20)
WIDTH, BLOCK = 2048, 8
TOKENS = 21
LENGTHS = (9, 12)  # of two sequences


@pytest.fixture(autouse=True)
def without_definitions(request):
    if request.node.callspec.params.get("kernels") == KERNELS[0]:
        pytest.skip("a program has no definition in csrc")


class Bench:
    """A program, and an arena whose blocks have a state in three layers."""

    def __init__(self, kernels, hidden: int = 20) -> None:
        self.program, self.room = kernels.LayerProgram(hidden, WIDTH), kernels.ProgramRoom()
        self.layers = [torch.full((6, 1024), 255, dtype=torch.uint8) for _ in range(3)]
        self.room.use([], self.layers, BLOCK)
        self.held = list[object]()
        self.place = 0

    def take(self, count: int) -> tuple[int, int, int, int]:
        at, apart = self.place, -(-count // 128) * 128
        self.place += apart
        return at, apart, 0, count

    def do(self, name: str, *given: object, **more: object) -> None:
        self.held += [*given, *more.values()]
        getattr(self.program, name)(*given, **more)

    def enter(self, values: Tensor) -> list[tuple[int, int, int, int]]:
        """Takes numbers for each token, which come from the states."""
        to, width = self.take(values.shape[1]), values.shape[1]
        self.do("take", to, (-1, 0, self.entered, width), torch.arange(width))
        self.entered += width
        return to

    entered = 0

    def run(self, states: Tensor, ends: tuple[tuple[int, int], ...] = ((0, LENGTHS[0]), (0, LENGTHS[1]))) -> None:
        """Of each sequence the tokens [start, end) are a step."""
        tables = torch.tensor([[0, 1, 2], [5, 4, 3]], dtype=torch.int32)
        counts = torch.tensor([0, *(end - start for start, end in ends)])
        batch = counts.cumsum(0).int(), torch.tensor([end for _, end in ends], dtype=torch.int32), tables
        slots = torch.full((len(states),), -1)
        self.held = [*self.held, batch, slots]
        self.room.begin(*batch, slots)
        self.program.run(states, self.room)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, tolerance: float = 3e-6) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_rows(kernels):
    bench, x = Bench(kernels), draw(1, TOKENS, 20) * 4
    states, wide = x.clone(), x.double()
    one, other, third = bench.take(20), bench.take(20), bench.take(20)
    weight, by, indices = draw(2, 5), draw(3, 20), torch.tensor([*range(19, 9, -1), *[4] * 10])
    matrix, bias = draw(4, 20, 20), draw(5, 20)
    product = kernels.Weight(matrix, "f32", 20, 20)
    bench.do("norm", one, STATES, weight, 1e-5, 5)
    normed = (wide.view(-1, 4, 5) / (wide.view(-1, 4, 5).square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1)
    normed = normed * weight.double().repeat(4)
    bench.do("scale", one, by)
    scaled = normed * by.double()
    bench.do("take", other, one, indices)
    bench.do("silu_mul", third, STATES, other)
    gated = functional.silu(wide) * scaled[:, indices]
    bench.do("sigmoid_mul", third, one, third)
    gated = gated * scaled.sigmoid()
    bench.do("multiply", third, other)
    gated = gated * scaled[:, indices]
    bench.do("linear", other, third, product, bias)
    bench.do("add", STATES, other, 0.5)
    expected = wide + 0.5 * (gated @ matrix.double().T + bias.double())
    bench.do("linear", STATES, third, product, accumulate=True)
    expected = expected + gated @ matrix.double().T
    bench.run(states)
    close(states, expected, 2e-5)


def test_inputs_that_a_product_changes_are_rounded_again(kernels):
    """One that takes its own as they are, so that those of the product before would be there."""
    bench, x = Bench(kernels, 64), draw(1, TOKENS, 64)
    states, one, plain = x.clone(), bench.take(64), draw(2, 64, 64)
    data = torch.empty(kernels.packed_bytes("halves", 64, 64), dtype=torch.uint8)
    kernels.pack(data, plain.bfloat16())
    halves, exact = kernels.Weight(data, "halves", 64, 64, "bfloat16"), kernels.Weight(plain, "f32", 64, 64)
    bench.do("linear", one, (-1, 0, 0, 64), halves)
    bench.do("linear", (-1, 0, 0, 64), one, exact)
    bench.do("linear", one, (-1, 0, 0, 64), halves)
    bench.do("take", (-1, 0, 0, 64), one, torch.arange(64))
    bench.run(states)
    once = plain.bfloat16().double().T
    expected = x.double() @ once @ plain.double().T @ once
    assert difference(states, expected) < 0.02


@pytest.mark.parametrize("size", [19, 38])
@pytest.mark.parametrize("gate_first", [False, True])
def test_norms_with_gates(kernels, gate_first, size):
    """Of all numbers, and of two parts, which have weights of their own."""
    bench, x, gates = Bench(kernels, 76), draw(1, TOKENS, 38), draw(2, TOKENS, 38) * 5
    states, weight, wide = torch.cat((x, gates), 1), draw(3, 38), x.double()
    bench.do("norm", (-1, 0, 0, 38), (-1, 0, 0, 38), weight, 1e-6, size, (-1, 0, 38, 38), gate_first)
    bench.run(states)
    gate = functional.silu(gates.double())
    entered = (wide * gate if gate_first else wide).view(TOKENS, -1, size)
    normed = (entered / (entered.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(1) * weight.double()
    close(states[:, :38], normed if gate_first else normed * gate)


ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kernels, kind):
    """Of small numbers, large ones, and some that are none."""
    bench, x = Bench(kernels), torch.cat([draw(1, 7, 20) * size for size in (0.1, 3, 50)])
    x[0, 3], x[0, 18] = torch.nan, torch.nan
    states = x.clone()
    bench.do("activate", STATES, kind)
    bench.run(states)
    torch.testing.assert_close(states.double(), ACTIVATIONS[kind](x.double()), rtol=1e-6, atol=6e-7, equal_nan=True)
    with pytest.raises(ValueError, match="kind"):
        bench.do("activate", STATES, "softmax")


def test_norms_with_means(kernels):
    bench, x = Bench(kernels, 24), draw(1, TOKENS, 24) * 3 + 5
    states, weight, bias = x.clone(), draw(2, 24), draw(3, 24)
    bench.do("layer_norm", (-1, 0, 0, 24), (-1, 0, 0, 24), weight, bias, 1e-5)
    bench.run(states)
    close(states, functional.layer_norm(x.double(), [24], weight.double(), bias.double(), 1e-5), 2e-6)


@pytest.mark.parametrize("both_ways", [False, True])
def test_attention_to_own_tokens_and_to_crossed_ones(kernels, both_ways):
    """Tokens of two sequences, that begin at some position of their pages; and to keys that another program kept."""
    heads, dim, starts = 2, 8, (3, 10)
    width = heads * dim
    given = draw(1, TOKENS, 4 * width)
    bias, bench = draw(2, heads, 9), Bench(kernels, 4 * width)
    pages = torch.full((8, heads, 2, BLOCK, dim), torch.nan)
    rooms = bench.room, kernels.ProgramRoom()
    for room in rooms:
        room.use([pages], [], BLOCK)
    tables = torch.tensor([[0, 1, 2], [5, 4, 3]], dtype=torch.int32)
    places = [(i, start + t) for i, start in enumerate(starts) for t in range(LENGTHS[i])]
    slots = torch.tensor([int(tables[i, p // BLOCK]) * BLOCK + p % BLOCK for i, p in places])
    kept, keeping = draw(3, 11, 2 * width), kernels.LayerProgram(2 * width, WIDTH)
    keeping.keep((-1, 0, 0, width), (-1, 0, width, width), 0, dim)
    lone = torch.tensor([0, 11], dtype=torch.int32), torch.tensor([11], dtype=torch.int32)
    lone_table, lone_slots = torch.tensor([[6, 7]], dtype=torch.int32), torch.arange(48, 59)
    rooms[1].begin(*lone, lone_table, lone_slots)
    keeping.run(kept.clone(), rooms[1])
    queries, keys, values, other = (bench.enter(part) for part in given.split(width, 1))
    to, crossed = bench.take(width), bench.take(width)
    bench.do("attend", to, queries, keys, values, 0, dim, 0, 0.3, bias=bias, both_ways=both_ways)
    bench.do("attend_crossed", crossed, other, 0, dim, 0.3)
    bench.do("take", (-1, 0, 0, width), to, torch.arange(width))
    bench.do("take", (-1, 0, width, width), crossed, torch.arange(width))
    ends = torch.tensor([start + length for start, length in zip(starts, LENGTHS, strict=True)], dtype=torch.int32)
    own = torch.tensor([0, *LENGTHS]).cumsum(0).int(), ends, tables, slots, torch.tensor(starts, dtype=torch.int32)
    each = torch.arange(TOKENS + 1, dtype=torch.int32), torch.full((TOKENS,), 11, dtype=torch.int32)
    named = torch.tensor([[6, 7]], dtype=torch.int32).repeat(TOKENS, 1)
    states = given.clone()
    bench.room.begin(*own, *each, named)
    bench.program.run(states, bench.room)

    def attended(q, k, v, mask):
        q, k, v = (x.double().view(len(x), heads, dim).transpose(0, 1) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3).transpose(0, 1).flatten(1)

    expected = []
    for parts in given.split(LENGTHS):
        q, k, v, _ = parts.split(width, 1)
        apart = torch.arange(len(parts))[None] - torch.arange(len(parts))[:, None]
        mask = bias.double()[:, apart.clamp(-4, 4) + 4]
        expected.append(attended(q, k, v, mask if both_ways else mask.masked_fill(apart > 0, -torch.inf)))
    close(states[:, :width], torch.cat(expected), 2e-5)
    keys, values = kept.split(width, 1)
    close(states[:, width : 2 * width], attended(given[:, 3 * width :], keys, values, None), 2e-5)


CUTS = (((0, 9), (0, 12)), ((0, 1), (0, 7)), ((1, 8), (7, 9)), ((8, 9), (9, 12)))


def in_pieces(make, wide: Tensor) -> Tensor:
    """What a program leaves of `wide` in one step, and that it leaves the same in several."""
    outputs = []
    for cuts in (CUTS[:1], CUTS[1:]):
        bench, found = make(), wide.clone()
        for ends in cuts:
            rows = torch.tensor([LENGTHS[0] * i + t for i, (start, end) in enumerate(ends) for t in range(start, end)])
            states = found[rows]
            bench.run(states, ends)
            found[rows] = states
        outputs += [found, torch.stack(bench.layers)[:, [0, 1, 5, 4]]]
    assert torch.equal(outputs[0], outputs[2])
    return outputs[0]


@pytest.mark.parametrize(("width", "channels"), [(2, 19), (4, 19), (2, 600)])
def test_a_convolution_goes_on_after_its_state(kernels, width, channels):
    """Of more channels than a thread takes at once, too."""
    taps, bias, x = draw(1, width, channels), draw(2, channels), draw(3, TOKENS, channels)

    def make():
        bench = Bench(kernels, channels)
        entered, to = bench.enter(x), bench.take(channels)
        bench.do("convolve", to, entered, taps, bias, True, 64)
        bench.do("take", (-1, 0, 0, channels), to, torch.arange(channels))
        return bench

    found = in_pieces(make, x)
    for part, given in zip(found.split(LENGTHS), x.double().split(LENGTHS), strict=True):
        padded = functional.pad(given.T, (width - 1, 0))[None]
        expected = functional.conv1d(padded, taps.double().T[:, None], bias.double(), groups=channels)[0].T
        close(part, functional.silu(expected))


def scanned(state: Tensor, decays: Tensor, keys: Tensor, added: Tensor, queries: Tensor, rate: Tensor | None) -> Tensor:
    """One token of a head: the state [keys, values] is changed."""
    state *= decays
    if rate is not None:
        added = rate * (added - keys @ state)
    state += keys[:, None] * added
    return queries @ state


@pytest.mark.parametrize("rule", ["delta", "mamba2"])
def test_recurrences_of_heads(kernels, rule):
    """Fades from next to nothing to all; a state of heads that lies in two layers."""
    heads, key_heads, dim, values = 4, 2, 9, 11
    counts = (key_heads * dim, key_heads * dim, heads * values, heads, heads)
    given = torch.cat([draw(i, TOKENS, count) * (8 if i > 2 else 1) for i, count in enumerate(counts)], 1)
    rates, bias, skips = -draw(7, heads).abs(), draw(8, heads), draw(9, heads)

    def make():
        bench = Bench(kernels, given.shape[1])
        queries, keys, wide, fades, betas = (bench.enter(part) for part in given.split(counts, 1))
        to, sizes = bench.take(heads * values), (heads, key_heads, dim, values)
        if rule == "delta":
            bench.do("delta", to, queries, keys, wide, fades, betas, rates, bias, 1e-6, sizes, 64)
        else:
            space = bench.take(heads * values)
            bench.do("mamba2", to, queries, keys, wide, fades, space, rates, bias, skips, 0.0, 3.0, sizes, 64)
        bench.do("take", (-1, 0, 0, heads * values), to, torch.arange(heads * values))
        return bench

    outputs = in_pieces(make, given)[:, : heads * values]
    queries, keys, wide, fades, betas = given.double().split(counts, 1)
    queries, keys = (x.view(TOKENS, key_heads, dim).repeat_interleave(heads // key_heads, 1) for x in (queries, keys))
    steps = functional.softplus(fades + bias.double())
    if rule == "delta":
        queries, keys = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (queries, keys))
        queries = queries * dim**-0.5
    else:
        steps = steps.clamp(0, 3)
    wide, expected = wide.view(TOKENS, heads, values), []
    for t in range(TOKENS):
        if t in (0, LENGTHS[0]):
            state = torch.zeros(heads, dim, values, dtype=torch.double)
        for h in range(heads):
            rate = betas[t, h].sigmoid() if rule == "delta" else None
            added = wide[t, h] if rule == "delta" else wide[t, h] * steps[t, h]
            read = scanned(state[h], (rates[h].double() * steps[t, h]).exp(), keys[t, h], added, queries[t, h], rate)
            expected.append(read if rule == "delta" else read + skips[h] * wide[t, h])
    close(outputs, torch.stack(expected).view(TOKENS, -1), 2e-5)


@pytest.mark.parametrize(("channels", "dim"), [(21, 11), (300, 2)])
def test_channels_of_mamba1(kernels, channels, dim):
    """Of more than a thread takes at once, too."""
    counts = (dim, dim, channels, channels)
    given = torch.cat([draw(i, TOKENS, count) * (8 if i > 2 else 1) for i, count in enumerate(counts)], 1)
    rates, bias, skips = -draw(7, channels, dim).abs(), draw(8, channels), draw(9, channels)

    def make():
        bench = Bench(kernels, given.shape[1])
        queries, keys, values, fades = (bench.enter(part) for part in given.split(counts, 1))
        to = bench.take(channels)
        bench.do("mamba1", to, queries, keys, values, fades, rates, bias, skips, 64)
        bench.do("take", (-1, 0, 0, channels), to, torch.arange(channels))
        return bench

    found = in_pieces(make, given)[:, :channels]
    queries, keys, values, fades = given.double().split(counts, 1)
    steps, expected = functional.softplus(fades + bias.double()), []
    for t in range(TOKENS):
        if t in (0, LENGTHS[0]):
            state = torch.zeros(channels, dim, dtype=torch.double)
        state = state * (rates.double() * steps[t, :, None]).exp() + (steps[t] * values[t])[:, None] * keys[t]
        expected.append(state @ queries[t] + skips * values[t])
    close(found, torch.stack(expected), 2e-5)


def test_a_program_refuses_what_lies_outside_or_is_not_there(kernels):
    program, room, error = kernels.LayerProgram(20, 256), kernels.ProgramRoom(), kernels.ArgumentError
    here, taps = (0, 128, 0, 20), draw(1, 3, 20)
    for says, name, *given in (
        ("to: lies outside", "multiply", (0, 128, 109, 20), here),
        ("to: lies outside", "multiply", (256, 128, 0, 20), here),
        ("to: lies outside", "multiply", (-2, 128, 0, 20), here),
        ("to: lies outside", "multiply", (129, 128, 0, 20), here),
        ("by: lies outside", "multiply", here, (-1, 0, 1, 20)),
        ("by: has another width", "multiply", here, (-1, 0, 0, 19)),
        ("indices: name a number", "take", here, STATES, torch.full((20,), 20)),
        ("to: overlaps with what is read", "convolve", here, here, taps, None, False, 64),
        ("to: overlaps with what is read", "convolve", here, (64, 64, 0, 20), taps, None, False, 64),
        ("to: overlaps with what is read", "convolve", here, (0, 64, 32, 20), taps, None, False, 64),
        ("taps: are not 2 to 16", "convolve", here, STATES, taps[:1], None, False, 64),
        ("size: does not divide", "norm", here, STATES, torch.ones(3), 1e-5, 3),
        ("place: is out of range", "convolve", here, STATES, taps, None, False, -64),
        ("head_dim: does not divide", "attend", here, STATES, STATES, STATES, 0, 8, 8, 1.0),
    ):
        with pytest.raises(error, match=f"^{says}"):
            getattr(program, name)(*given)
    program.convolve(here, STATES, taps, None, False, 64)
    states = draw(2, 1, 20)
    with pytest.raises(error, match=r"^room: has no step"):
        program.run(states, room)
    layers, count = [torch.zeros(2, 64, dtype=torch.uint8)], torch.tensor([0, 1], dtype=torch.int32)
    table, slots = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0])
    with pytest.raises(error, match=r"^room: has no arena"):
        room.begin(count, count[1:], table, slots)
    room.use([], layers, 8)
    room.begin(count, count[1:], table, slots)
    with pytest.raises(error, match=r"^room: lacks states"):
        program.run(states, room)
    for says, *given in (
        ("states: are layers of several forms", layers[0], torch.zeros(2, 128, dtype=torch.uint8)),
        ("states: are no floats of blocks", torch.zeros(2, 66, dtype=torch.uint8)),
        ("states: are no floats of blocks", torch.zeros(2, 64, dtype=torch.uint8)[:0]),
        ("states: .*contiguous", torch.zeros(2, 64, 2, dtype=torch.uint8)[..., 0]),
        ("states: ", torch.zeros(2, 4, 64, dtype=torch.uint8)[:, ::2]),
        ("states: ", torch.zeros(2, 16)),
    ):
        with pytest.raises(error, match=f"^{says}"):
            room.use([], given, 8)
    wide, many = kernels.LayerProgram(20, 2**47), torch.zeros(4, 20)
    counts, slots = torch.tensor([0, 4], dtype=torch.int32), torch.full((4,), -1)
    room.use([], layers, 8)
    room.begin(counts, counts[1:], table, slots)
    with pytest.raises(error, match=r"^states: has more tokens than there is memory for"):
        wide.run(many, room)
    heads, dim = 4 * 5 * 5581 * 8681, 49477 * 384773
    assert heads * dim == 2**64 + 4
    to, values, fades = ((i * heads, heads, 0, heads) for i in range(3))
    queries, keys = (3 * heads, 4, 0, 4), (3 * heads + 4, 4, 0, 4)
    with pytest.raises(error, match=r"^queries: has another width"):
        wide.delta(to, queries, keys, values, fades, fades, taps, taps, 1e-6, (heads, heads, dim, 1), 0)
