"""What a whole step refers to: memory that stays, and a workspace that threads share by turns."""

import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from small_decoder import BLOCK_SIZE, BLOCKS, Weights
from torch import Tensor


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
        ("router_bias", weights.tensor(4)),
        ("router_correction", weights.tensor(2)),
        ("expert_gate_up_bias", weights.tensor(3, 32)),
        ("expert_down_bias", weights.tensor(2, 32)),
        ("groups", 2),
        ("groups", 3),
        ("top_groups", 2),
        ("share_scale", float("inf")),
        ("swiglu_limit", float("nan")),
    ]
    for name, value in wrong:
        layer = weights.layer() | weights.experts() | {name: value}
        with pytest.raises(ValueError, match=f"^({name}|router)"):
            extension.Llama(**weights.arguments() | {"layers": [layer]})


@pytest.mark.parametrize("sizes", [(16, 32), (32, 32), (32, None)])
def test_norms_are_of_a_head_each_or_of_all(extension: ModuleType, sizes: tuple[int, int | None]) -> None:
    weights = Weights(extension)
    norms = {name: weights.tensor(size) for name, size in zip(("q_norm", "k_norm"), sizes, strict=True) if size}
    with pytest.raises(ValueError, match=r"^[qk]_norm"):
        extension.Llama(**weights.arguments() | {"layers": [weights.layer() | norms]})


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
