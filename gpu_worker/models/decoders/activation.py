"""Activation functions whose bits depend on each number alone, whatever is computed beside it."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

ElementFunction = Callable[[Tensor], Tensor]
REGISTERS = 64  # numbers that torch takes at once on a CPU, at most: two registers of bfloat16


def _by_registers(function: ElementFunction) -> ElementFunction:
    """`function`, which torch computes otherwise, with other bits, for the numbers at the end of a tensor that do not
    fill its registers. Which these are depends on the number of rows, unless rows fill registers."""

    def compute(x: Tensor) -> Tensor:
        missing = -x.shape[-1] % REGISTERS
        if not missing or x.device.type != "cpu":
            return function(x)
        return function(functional.pad(x, (0, missing)))[..., :-missing]

    return compute


gelu = _by_registers(functional.gelu)
gelu_tanh = _by_registers(lambda x: functional.gelu(x, approximate="tanh"))
silu = _by_registers(functional.silu)
