"""One good call of everything the extension offers to programs of layers."""

from typing import Any

import torch
from fenced_calls import Call, Given, kv, of
from torch import Tensor, ones, rand, randn, zeros

STATES, WIDE = (-1, 0, 0, 32), 2048
SIZES = (2, 1, 4, 8)  # heads, heads of keys, dimensions of keys and of values
Operation = tuple[str, dict[str, Any]]


def taken(*counts: int) -> list[tuple[int, ...]]:
    """Slices of matrices behind each other."""
    return [(64 * sum(-(-each // 64) for each in counts[:i]), 64, 0, count) for i, count in enumerate(counts)]


def norm(_: Any) -> Operation:
    to, gate = taken(32, 32)
    more = {"eps": 1e-5, "size": 16, "gate": gate, "gate_first": True}
    return "norm", {"to": to, "from_": STATES, "weight": ones(16), **more}


def layer_norm(_: Any) -> Operation:
    return "layer_norm", {"to": taken(32)[0], "from_": STATES, "weight": ones(32), "bias": ones(32), "eps": 1e-5}


def scale(_: Any) -> Operation:
    return "scale", {"to": STATES, "by": ones(32)}


def take(_: Any) -> Operation:
    return "take", {"to": taken(4)[0], "from_": STATES, "indices": torch.tensor([31, 0, 4, 4])}


def linear(g: Any) -> Operation:
    more = {"weight": g.matrix(32, 8), "bias": randn(32), "accumulate": True}
    return "linear", {"to": STATES, "from_": taken(8)[0], **more}


def convolve(_: Any) -> Operation:
    more = {"taps": randn(3, 32), "bias": randn(32), "silu": True, "place": 64}
    return "convolve", {"to": taken(32)[0], "from_": STATES, **more}


def recurrence(*names: str) -> dict[str, Any]:
    counts = {"to": 16, "queries": 4, "keys": 4, "values": 16, "fades": 2, "betas": 2, "space": 16}
    slices = dict(zip(counts, taken(*counts.values()), strict=True))
    more = {"rates": -rand(2), "bias": randn(2), "sizes": SIZES, "place": 320}
    return {name: slices[name] for name in ("to", "queries", "keys", "values", "fades", *names)} | more


def delta(_: Any) -> Operation:
    return "delta", {**recurrence("betas"), "eps": 1e-6}


def mamba2(_: Any) -> Operation:
    return "mamba2", {**recurrence("space"), "skips": ones(2), "low": 0.0, "high": 1.0}


def attend(_: Any) -> Operation:
    slices = dict(zip(("to", "queries", "keys", "values"), taken(64, 64, 32, 32), strict=True))
    more = {"layer": 0, "head_dim": 16, "rotated": 0, "scale": 0.25, "window": 0, "soft_cap": 0.0}
    return "attend", {**slices, **more, "bias": ones(4, 5), "both_ways": True}


def adding(make: Any) -> Any:
    def call(g: Given) -> Call:
        name, arguments = make(g)
        program = g.module.LayerProgram(32, WIDE)
        return Call(getattr(program, name), arguments, held=program)

    return call


def mamba1(_: Any) -> Operation:
    slices = dict(zip(("to", "queries", "keys", "values", "fades"), taken(16, 4, 4, 16, 16), strict=True))
    more = {"rates": -rand(16, 4), "bias": randn(16), "skips": ones(16), "place": 640}
    return "mamba1", {**slices, **more}


for each in (norm, layer_norm, scale, take, linear, convolve, delta, mamba1, mamba2, attend):
    of(f"LayerProgram.{each.__name__}")(adding(each))


def arena() -> list[Tensor]:
    return [zeros(4, 512, dtype=torch.uint8) for _ in range(2)]


@of("ProgramRoom.begin")
def room_begin(g: Given) -> Call:
    room, layers, states = g.module.ProgramRoom(), [kv()], arena()
    room.use(layers, states, 8)
    crossed = {
        f"crossed_{name}": each for name, each in zip(("cu_q", "lens", "tables"), g.batch().values(), strict=True)
    }
    given = {**g.batch(), "slots": g.longs(8, 18), "starts": g.ints(2, 0), **crossed}
    return Call(room.begin, given, held=(room, layers, states))


@of("LayerProgram.run", "states")
def program_run(g: Given) -> Call:
    """All operations that other calls have, and attention."""
    program, room, layers, states = g.module.LayerProgram(32, WIDE), g.module.ProgramRoom(), [kv()], arena()
    held = [make(g) for make in (norm, layer_norm, scale, take, linear, convolve, delta, mamba1, mamba2, attend)]
    for name, arguments in held:
        getattr(program, name)(**arguments)
    to, queries, keys, values = taken(64, 64, 32, 32)
    program.attend(to, queries, keys, values, 0, 16, 8, 0.25)
    program.keep(keys, values, 0, 16)
    program.attend_crossed(to, queries, 0, 16, 0.25)
    program.activate(to, "gelu")
    program.silu_mul(to, queries, to)
    program.sigmoid_mul(to, queries, to)
    program.multiply(to, queries)
    program.add(STATES, keys, 0.5)
    room.use(layers, states, 8)
    batch, slots = g.batch(), g.longs(8, 18)
    room.begin(*batch.values(), slots, None, *batch.values())

    def run(**given: Any) -> None:
        program.run(room=room, **given)

    given = {"states": randn(g.n, 32), "cos": ones(g.n, 4), "sin": ones(g.n, 6)}
    return Call(run, given, held=(held, room, layers, states, batch, slots, program))
