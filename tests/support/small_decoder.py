"""The weights of a native decoder with one layer."""

import gc
import weakref
from types import ModuleType
from typing import Any

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

    def matrix(self, rows: int, cols: int = 32) -> Any:
        return self.extension.Weight(self.tensor(rows, cols), "f32", rows, cols)

    def stack(self, *rows: int) -> tuple[Any, ...]:
        return tuple(self.matrix(count) for count in rows)

    def layer(self) -> dict[str, Any]:
        norms = {"input_norm": self.tensor(32), "mlp_norm": self.tensor(32), "sinks": self.tensor(2)}
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
        biases = {"expert_gate_up_bias": self.tensor(3, 64), "expert_down_bias": self.tensor(3, 32)}
        router = {"router": self.stack(3), "router_bias": self.tensor(3), "router_correction": self.tensor(3)}
        return {**many, **shared, **biases, **router, "top": 2}

    def latents(self) -> dict[str, Any]:
        """Arguments of a decoder whose heads share a latent of 16 numbers."""
        norms = {name: self.tensor(size) for name, size in (("q_norm", 32), ("k_norm", 16))}
        layer = {name: part for name, part in self.layer().items() if name != "sinks"} | norms
        layer |= {"qkv": self.stack(32, 24), "queries": self.stack(2 * 24), "out": self.stack(32)}
        layer |= {"latent_keys": (self.matrix(2 * 16, 16),), "latent_values": (self.matrix(2 * 16, 16),)}
        latent = {"rank": 16, "query_rank": 32, "rotated": 8, "plain": 16, "values": 16, "eps": 1e-6}
        angles = {name: self.tensor(BLOCKS * BLOCK_SIZE, 8) for name in ("cos", "sin")}
        sizes = SIZES | {"kv_heads": 1, "head_dim": 24, "latent": latent}
        return self.arguments() | angles | {"sizes": sizes, "layers": [layer]}

    def arguments(self) -> dict[str, Any]:
        norm, cos, sin = self.tensor(32), self.tensor(BLOCKS * BLOCK_SIZE, 16), self.tensor(BLOCKS * BLOCK_SIZE, 16)
        matrices = {"embedding": self.matrix(16), "head": self.matrix(16)}
        return {"sizes": SIZES, **matrices, "norm": norm, "cos": cos, "sin": sin, "layers": [self.layer()]}

    def alive(self) -> list[bool]:
        gc.collect()
        return [tensor() is not None for tensor in self.tensors]
