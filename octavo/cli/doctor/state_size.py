"""The numbers of a state that a model with recurrent layers keeps with each block, by its files alone."""

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

CONVOLUTION = re.compile(r".*(conv1d|\.conv\.conv|ssm_conv1d(_[qkv])?|shortconv\.conv)\.weight")
DECAY = re.compile(r".*\.(A_log|ssm_a)")  # each recurrence has one
# By what name a configuration has sizes of a recurrence: of a head's columns, and of its rows.
MAMBA2_COLUMNS = ("mamba_d_head", "mamba_head_dim", "head_dim")
MAMBA2_ROWS = ("mamba_d_state", "ssm_state_size", "state_size")


def numbers_of_folder(shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> int:
    """`shapes`: of all tensors."""
    return _inputs(shapes, kernel=-1) + sum(
        _recurrence(shape, config) for name, shape in shapes.items() if DECAY.fullmatch(name)
    )


def numbers_of_file(shapes: Mapping[str, Sequence[int]], num_inner: int, num_rows: int) -> int:
    """`num_inner` and `num_rows`: what a GGUF file says of its recurrences."""
    return _inputs(shapes, kernel=0) + sum(num_inner * num_rows for name in shapes if DECAY.fullmatch(name))


def _inputs(shapes: Mapping[str, Sequence[int]], kernel: int) -> int:
    """The inputs that convolutions remember: of each kernel all places but one. `kernel`: which axis has its places."""
    sized = [shape for name, shape in shapes.items() if CONVOLUTION.fullmatch(name)]
    return sum(prod(shape) // shape[kernel] * (shape[kernel] - 1) for shape in sized)


def _recurrence(decay: Sequence[int], config: Mapping[str, Any]) -> int:
    if len(decay) == 2:  # Mamba 1 has one for each of its numbers
        return prod(decay)
    heads = prod(decay)
    if width := config.get("linear_head_dim"):
        return heads * int(width) ** 2
    if rows := config.get("linear_key_head_dim"):
        return heads * int(rows) * int(config["linear_value_head_dim"])
    return heads * _first(config, MAMBA2_COLUMNS) * _first(config, MAMBA2_ROWS)


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)
