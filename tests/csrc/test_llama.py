"""What a whole step refers to: memory that stays, and a workspace that threads share by turns."""

import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from small_decoder import BLOCK_SIZE, BLOCKS, Weights
from torch import Tensor


def test_what_it_refers_to_lives_as_long_as_it_does(extension: ModuleType) -> None:
    """A decoder's weights, an adapter's, and the layers of an arena, whatever becomes of the lists they came in."""

    def llama(weights: Weights) -> tuple[object, list]:
        arguments = weights.arguments()
        arguments["layers"].append(weights.layer() | weights.experts())
        return extension.Llama(**arguments), [*arguments["layers"], arguments["layers"], arguments]

    def lora(weights: Weights) -> tuple[object, list]:
        layers = [{"out": (weights.matrix(4), ((weights.matrix(4), 0),))}]
        return extension.Lora(1.0, layers), [layers[0], layers]

    def kv(weights: Weights) -> tuple[object, list]:
        layers = [weights.tensor(4, 1, 2, BLOCK_SIZE, 16), extension.KvCache(weights.tensor(4, 1, 2, BLOCK_SIZE, 16))]
        return extension.Kv(layers), [layers]

    for make in (llama, lora, kv):
        weights = Weights(extension)
        made, containers = make(weights)
        for each in containers:
            each.clear()
        del containers, each
        assert all(weights.alive()), make.__name__
        del made
        assert not any(weights.alive()), make.__name__


def test_parts_that_do_not_fit_are_refused_by_name(extension: ModuleType) -> None:
    """Experts, and norms of queries and keys, which are of a head each or of all."""
    weights = Weights(extension)
    tensor, stack = weights.tensor, weights.stack
    wrong = {
        "router": [stack(4), ()],
        "expert_gate_up": [stack(64, 64), stack(64, 64, 32)],
        "expert_down": [stack(32, 32, 16)],
        "top": [0, 4],
        "shared_gate_up": [stack(32)],
        "shared_down": [stack(32, 32)],
        "shared_gate": [stack(2)],
        "router_bias": [tensor(4)],
        "router_correction": [tensor(2)],
        "expert_gate_up_bias": [tensor(3, 32)],
        "expert_down_bias": [tensor(2, 32)],
        "groups": [2, 3],
        "top_groups": [2],
        "share_scale": [float("inf")],
        "swiglu_limit": [float("nan")],
    }
    rows = [(name, value) for name, values in wrong.items() for value in values]
    layers = [(weights.experts() | {name: value}, f"{name}|router") for name, value in rows]
    norms = [{"q_norm": tensor(16), "k_norm": tensor(32)}, {"q_norm": tensor(32), "k_norm": tensor(32)}]
    layers += [(each, "[qk]_norm") for each in (*norms, {"q_norm": tensor(32)})]
    for spoilt, who in layers:
        with pytest.raises(ValueError, match=f"^({who})"):
            extension.Llama(**weights.arguments() | {"layers": [weights.layer() | spoilt]})


def test_norms_scales_and_angles_that_do_not_fit_are_refused_by_name(extension: ModuleType) -> None:
    weights = Weights(extension)
    tensor, arguments, normed = weights.tensor, weights.arguments(), {"post_norms": True}
    after = {"attended_norm": tensor(32), "output_norm": tensor(32)}
    rows: list[tuple[dict, dict, str]] = [
        *(({name: value}, {}, "sizes") for name in ("logit_cap", "attention_cap") for value in (-1.0, float("nan"))),
        *(({name: float("inf")}, {}, "sizes") for name in ("sum_scale", "embedding_scale", "logit_divisor")),
        ({"logit_divisor": 0.0}, {}, "sizes"),
        (normed, {}, "post_norms"),
        ({}, after, "post_norms"),
        (normed, after | {"output_norm": tensor(16)}, "output_norm"),
        (normed, after | weights.experts(), "router"),
        ({"sum_scale": 0.5}, weights.experts(), "router"),
        ({}, {"cos": tensor(BLOCKS * BLOCK_SIZE, 16)}, "cos"),
        ({}, {"cos": tensor(8, 16), "sin": tensor(8, 16)}, "cos"),
    ]
    for sizes, layer, who in rows:
        with pytest.raises(ValueError, match=f"^{who}"):
            extension.Llama(
                **arguments | {"sizes": arguments["sizes"] | sizes, "layers": [arguments["layers"][0] | layer]}
            )
    layer = {name: part for name, part in arguments["layers"][0].items() if name not in ("input_norm", "mlp_norm")}
    with pytest.raises(ValueError, match=r"^input_norm"):
        extension.Llama(**arguments | {"layers": [layer]})
    extension.Llama(**arguments | {"sizes": arguments["sizes"] | normed, "layers": [layer | after]})


def test_latents_that_do_not_fit_are_refused_by_name(extension: ModuleType) -> None:
    weights = Weights(extension)
    arguments, tensor, stack = weights.latents(), weights.tensor, weights.stack
    extension.Llama(**arguments)
    packed = extension.Weight(torch.zeros(extension.packed_bytes("q8", 24, 32), dtype=torch.uint8), "q8", 24, 32)
    layers: list[tuple[dict, str]] = [
        ({"qkv": stack(24, 24)}, "qkv"),
        ({"queries": ()}, "queries"),
        ({"latent_keys": (weights.matrix(32, 8),)}, "latent_keys"),
        ({"latent_keys": (weights.matrix(16, 16),) * 2}, "latent_keys"),
        ({"latent_values": ()}, "latent_values"),
        ({"out": stack(16)}, "out"),
        ({"q_norm": tensor(16)}, "q_norm"),
        ({"k_norm": tensor(24)}, "k_norm"),
        *(({name: value}, "latent") for name, value in (("window", 3), ("rotated", False), ("sinks", tensor(2)))),
    ]
    sizes: list[tuple[dict, str]] = [
        ({"latent": arguments["sizes"]["latent"] | {"rank": 24}}, "latent"),
        ({"latent": arguments["sizes"]["latent"] | {"plain": -1}}, "latent"),
        ({"latent": arguments["sizes"]["latent"] | {"rotated": 16, "rank": 8}}, "latent"),
        ({"latent": {"width": 3}}, "latent"),
        ({"kv_heads": 2}, "latent"),
    ]
    for layer, who in layers:
        with pytest.raises(ValueError, match=f"^{who}"):
            extension.Llama(**arguments | {"layers": [arguments["layers"][0] | layer]})
    for some, who in sizes:
        with pytest.raises(ValueError, match=f"^{who}"):
            extension.Llama(**arguments | {"sizes": arguments["sizes"] | some})
    wide = {"latent": arguments["sizes"]["latent"] | {"rank": 32, "values": 12}, "head_dim": 40}
    layer = {"qkv": stack(32, 40), "k_norm": tensor(32), "latent_keys": (weights.matrix(64, 16),)}
    layer |= {"latent_values": (packed,), "out": (weights.matrix(32, 24),)}
    with pytest.raises(ValueError, match=r"^latent_values: has heads that are not whole groups of rows"):
        extension.Llama(**arguments | {"sizes": arguments["sizes"] | wide, "layers": [arguments["layers"][0] | layer]})
    with pytest.raises(ValueError, match=r"^lora: is for a model whose heads"):
        extension.Llama(**arguments).check_lora(extension.Lora(1.0, [{}]))


def test_a_step_without_tokens_has_no_states(extension: ModuleType) -> None:
    """Also of a decoder whose heads share a latent."""
    none, ends = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    table, lens = torch.empty(0, BLOCKS, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    weights = Weights(extension)
    for arguments, size in ((weights.arguments(), 16), (weights.latents(), 24)):
        pages, hidden = torch.zeros(BLOCKS, 1, 2, BLOCK_SIZE, size), torch.empty(0, 32)
        extension.Llama(**arguments).forward(hidden, none, none, none, ends, lens, table, none, extension.Kv([pages]))
        assert not pages.any()


class PictureStep:
    """A step of one sequence of eight tokens, some of which may show a picture."""

    def __init__(self, extension: ModuleType) -> None:
        torch.manual_seed(2)
        self.arguments = Weights(extension).arguments()
        self.matrix = torch.randn(16, 32)
        self.arguments["embedding"] = extension.Weight(self.matrix, "f32", 16, 32)
        self.llama, self.kv = extension.Llama(**self.arguments), extension.Kv([torch.zeros(1, 1, 2, 8, 16)])

    def run(self, tokens: list[int], positions: list[int], **pictures: Any) -> Tensor:
        hidden, batch = torch.empty(8, 32), (torch.arange(8), *(torch.tensor([*x]).int() for x in ((0, 8), (8,))))
        self.llama.forward(
            *(hidden, torch.tensor(tokens), torch.tensor(positions), *batch, torch.zeros(1, 1).int(), torch.arange(8)),
            *(self.kv, None, ()),
            **pictures,
        )
        return hidden


def test_what_shows_a_picture_has_its_states_and_its_angles(extension: ModuleType) -> None:
    """Those of other tokens at other positions, which give the same bits; and what is added to some after a layer."""
    step, tokens, positions = PictureStep(extension), [3, 1, 4, 1, 5, 9, 2, 6], [0, 1, 2, 2, 3, 3, 4, 5]
    rows = torch.tensor([2, 3, 5])
    shown = {f"picture_{name}": step.arguments[name][positions] for name in ("cos", "sin")}
    shown |= {"picture_rows": rows, "picture_states": step.matrix[[4, 1, 9]]}
    expected = step.run(tokens, positions)
    hidden = step.run([3, 1, 0, 0, 5, 0, 2, 6], [*range(8)], **shown)
    assert torch.equal(hidden, expected)
    deeper = torch.cat((shown["picture_states"], torch.randn(3, 32)), 1)
    changed = step.run([3, 1, 0, 0, 5, 0, 2, 6], [*range(8)], **shown | {"picture_states": deeper}) != expected
    assert changed.any(1).nonzero().flatten().tolist() == rows.tolist()


def test_pictures_that_do_not_fit_are_refused_by_name(extension: ModuleType) -> None:
    step, angles = PictureStep(extension), torch.zeros(8, 16)
    good = {"picture_rows": torch.tensor([1, 3]), "picture_states": torch.zeros(2, 32)}
    good |= {"picture_cos": angles, "picture_sin": angles.clone()}
    step.run([0] * 8, [0] * 8, **good)
    for name, value, what in (
        ("picture_cos", None, "picture_cos.*not given"),
        ("picture_sin", torch.zeros(7, 16), "picture_sin"),
        ("picture_cos", torch.zeros(8, 8), "picture_cos"),
        ("picture_rows", torch.tensor([3, 1]), "picture_rows.*order"),
        ("picture_rows", torch.tensor([3, 3]), "picture_rows.*order"),
        ("picture_rows", torch.tensor([-1, 3]), "picture_rows.*range"),
        ("picture_rows", torch.tensor([1, 8]), "picture_rows.*range"),
        ("picture_states", torch.zeros(3, 32), "picture_states"),
        ("picture_states", torch.zeros(2, 33), "picture_states.*width"),
        ("picture_states", torch.zeros(2, 96), "picture_states.*width"),
        ("picture_states", None, "picture_states"),
    ):
        with pytest.raises(ValueError, match=what):
            step.run([0] * 8, [0] * 8, **good | {name: value})


def test_threads_take_turns(extension: ModuleType) -> None:
    """Those that step the same decoder, in arenas of their own, get what each would alone."""
    arguments = Weights(extension).arguments()
    arguments["layers"][0] |= Weights(extension).experts()
    llama = extension.Llama(**arguments)

    def states(tokens: int) -> Iterator[Tensor]:
        kv = extension.Kv([torch.zeros(BLOCKS, 1, 2, BLOCK_SIZE, 16)])
        places, lens = torch.arange(tokens), torch.tensor([tokens], dtype=torch.int32)
        table, cu_q = torch.arange(BLOCKS, dtype=torch.int32)[None], torch.tensor([0, tokens], dtype=torch.int32)
        while True:
            hidden = torch.empty(tokens, 32)
            llama.forward(hidden, places % 16, places, places, cu_q, lens, table, places, kv)
            yield hidden

    def work(tokens: int, expected: Tensor) -> None:
        steps = zip(range(150), states(tokens), strict=False)
        wrong.extend(tokens for _, hidden in steps if not hidden.equal(expected))

    wrong: list[int] = []
    alone = {tokens: next(states(tokens)) for tokens in (3, 90, 17)}
    threads = [threading.Thread(target=work, args=pair) for pair in alone.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
