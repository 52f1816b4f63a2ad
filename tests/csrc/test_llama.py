"""What a whole step refers to: memory that stays, and a workspace that threads share by turns."""

import gc
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

SIZES = {"vocab": 16, "hidden": 32, "inner": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "eps": 1e-5, "scale": 0.25}
BLOCKS, BLOCK_SIZE = 24, 8


class Weights:
    """The weights of a decoder with one layer; only the decoder holds their tensors."""

    def __init__(self, extension: ModuleType) -> None:
        self.extension = extension
        self.tensors: list[weakref.ref[Tensor]] = []

    def tensor(self, *shape: int) -> Tensor:
        tensor = torch.randn(shape) / 4
        self.tensors.append(weakref.ref(tensor))
        return tensor

    def matrix(self, rows: int) -> Any:
        return self.extension.Weight(self.tensor(rows, 32), "f32", rows, 32)

    def stack(self, *rows: int) -> tuple[Any, ...]:
        return tuple(self.matrix(count) for count in rows)

    def layer(self) -> dict[str, Any]:
        norms = {"input_norm": self.tensor(32), "mlp_norm": self.tensor(32)}
        return norms | {
            "qkv": self.stack(32, 16, 16),
            "out": self.stack(32),
            "gate_up": self.stack(64),
            "down": self.stack(32),
        }

    def experts(self) -> dict[str, Any]:
        """In the place of gate_up and down: three experts, of which each token asks two, and a shared one."""
        many = {"expert_gate_up": self.stack(64, 64, 64), "expert_down": self.stack(32, 32, 32)}
        shared = {"shared_gate_up": self.stack(64), "shared_down": self.stack(32), "shared_gate": self.stack(1)}
        return {**many, **shared, "router": self.stack(3), "top": 2}

    def arguments(self) -> dict[str, Any]:
        norm, cos, sin = self.tensor(32), self.tensor(BLOCKS * BLOCK_SIZE, 16), self.tensor(BLOCKS * BLOCK_SIZE, 16)
        matrices = {"embedding": self.matrix(16), "head": self.matrix(16)}
        return {"sizes": SIZES, **matrices, "norm": norm, "cos": cos, "sin": sin, "layers": [self.layer()]}

    def alive(self) -> list[bool]:
        gc.collect()
        return [tensor() is not None for tensor in self.tensors]


def test_what_it_refers_to_lives_as_long_as_it_does(extension: ModuleType) -> None:
    weights = Weights(extension)
    arguments = weights.arguments()
    arguments["layers"].append(weights.layer() | weights.experts())
    llama = extension.Llama(**arguments)
    arguments["layers"][0].clear()
    arguments["layers"].clear()
    del arguments
    assert all(weights.alive())
    del llama
    assert not any(weights.alive())


def test_experts_that_do_not_fit_are_refused_by_name(extension: ModuleType) -> None:
    weights = Weights(extension)
    wrong = [
        ("router", weights.stack(4)),
        ("router", ()),
        ("expert_gate_up", weights.stack(64, 64)),
        ("expert_gate_up", weights.stack(64, 64, 32)),
        ("expert_down", weights.stack(32, 32, 16)),
        ("top", 0),
        ("top", 4),
        ("shared_gate_up", weights.stack(32)),
        ("shared_down", weights.stack(32, 32)),
        ("shared_gate", weights.stack(2)),
    ]
    for name, value in wrong:
        layer = weights.layer() | weights.experts() | {name: value}
        with pytest.raises(ValueError, match=f"^({name}|router)"):
            extension.Llama(**weights.arguments() | {"layers": [layer]})


@pytest.mark.parametrize("as_cache", [False, True])
def test_layers_of_an_arena_outlive_the_list_they_came_in(extension: ModuleType, as_cache: bool) -> None:
    weights = Weights(extension)
    tensor = weights.tensor(4, 1, 2, BLOCK_SIZE, 16)
    layers = [extension.KvCache(tensor) if as_cache else tensor]
    kv = extension.Kv(layers)
    layers.clear()
    del tensor
    assert all(weights.alive())
    del kv
    assert not any(weights.alive())


def test_threads_take_turns(extension: ModuleType) -> None:
    """Two that step the same decoder, in arenas of their own, get what each would alone."""
    weights = Weights(extension)
    arguments = weights.arguments()
    arguments["layers"][0] |= weights.experts()
    llama = extension.Llama(**arguments)

    def states(tokens: int) -> Iterator[Tensor]:
        kv = extension.Kv([torch.zeros(BLOCKS, 1, 2, BLOCK_SIZE, 16)])
        places = torch.arange(tokens)
        lens = torch.tensor([tokens], dtype=torch.int32)
        table, cu_q = torch.arange(BLOCKS, dtype=torch.int32)[None], torch.tensor([0, tokens], dtype=torch.int32)
        while True:
            hidden = torch.empty(tokens, 32)
            llama.forward(hidden, places % 16, places, places, cu_q, lens, table, places, kv)
            yield hidden

    def work(tokens: int, expected: Tensor) -> None:
        wrong.extend(
            tokens for _, hidden in zip(range(150), states(tokens), strict=False) if not hidden.equal(expected)
        )

    wrong: list[int] = []
    lengths = (3, 90, 17)
    alone = [next(states(tokens)) for tokens in lengths]
    threads = [threading.Thread(target=work, args=pair) for pair in zip(lengths, alone, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
