"""Which products of a model with pictures are those of the ops."""

import torch
from torch import Tensor, nn

from gpu_worker.models.through_transformers.pictures.encoder import multiply_by_ops
from gpu_worker.ops.reference import ReferenceOps


class CountingOps(ReferenceOps):
    calls = 0

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.calls += 1
        return super().linear(x, weight, bias)


def test_linear_layers_and_convolutions_of_patches_are_products_of_the_ops():
    torch.manual_seed(1)
    patch = (2, 4, 4)
    model, ops = nn.ModuleList([nn.Conv3d(3, 8, patch, patch), nn.Linear(8, 5, bias=False)]), CountingOps()
    patches = torch.randn(6, 3, *patch)

    def run() -> Tensor:
        return model[1](model[0](patches).view(6, 8))

    expected = run()
    multiply_by_ops(model, ops)
    torch.testing.assert_close(run(), expected)
    assert ops.calls == 2
