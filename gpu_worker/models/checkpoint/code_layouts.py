"""Where AWQ, GPTQ and compressed-tensors keep the codes, scales and zeros of a matrix.

| | AWQ (gemm) | GPTQ | compressed-tensors |
|---|---|---|---|
| codes | `qweight` [columns, rows / 8] | `qweight` [columns / n, rows] | `weight_packed` [rows, columns / n] |
| scales | `scales` [groups, rows] | `scales` [groups, rows] | `weight_scale` [rows, groups] |
| zeros | `qzeros` [groups, rows / 8] | `qzeros` [groups, rows / n] | `weight_zero_point` [rows / n, groups] |
| groups of columns | in order | `g_idx` [columns] | `weight_g_idx` [columns], or in order |

n numbers share a word of 32 bits, least significant first. AWQ has them in another order (`AWQ_PLACES`). Version 1 of
GPTQ stores zeros minus one. compressed-tensors means signed numbers, which are packed plus half of their range; in its
format int-quantized codes are `weight` in int8, and zeros are not packed either.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.codes import Meaning, unpack
from gpu_worker.models.checkpoint.weights import WeightSource
from octavo.request.errors import BadModel

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight neighbouring rows


class CodeLayout(Protocol):
    codes: tuple[str, ...]  # the last part of the names of tensors with codes
    others: tuple[str, ...]  # those of all other tensors of such a matrix
    needed: tuple[str, ...]  # those of `others` that no matrix does without

    def read_meaning(self, source: WeightSource, stem: str) -> Meaning: ...

    def read_codes(self, source: WeightSource, stem: str, meaning: Meaning) -> Tensor:
        """uint8 [rows, columns]."""
        ...


class AwqLayout:
    codes: tuple[str, ...] = ("qweight",)
    others: tuple[str, ...] = ("qzeros", "scales")
    needed: tuple[str, ...] = others

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._group_size = int(settings.get("group_size", 128))

    def read_meaning(self, source: WeightSource, stem: str) -> Meaning:
        words, scales = words_of(source, f"{stem}.qweight"), source.get(f"{stem}.scales").t()
        zeros = self._unpacked(words_of(source, f"{stem}.qzeros")).to(torch.int16)
        groups = in_order(f"{stem}.qweight", len(words), self._group_size, scales.shape[1])
        return Meaning(4, scales, zeros, groups).with_checked_groups(stem)

    def read_codes(self, source: WeightSource, stem: str, meaning: Meaning) -> Tensor:
        return self._unpacked(words_of(source, f"{stem}.qweight"))

    @staticmethod
    def _unpacked(words: Tensor) -> Tensor:
        numbers = unpack(words, 4)
        return torch.stack([numbers[place].t() for place in AWQ_PLACES], dim=1).view(-1, len(words))


class GptqLayout:
    codes: tuple[str, ...] = ("qweight",)
    others: tuple[str, ...] = ("qzeros", "scales", "g_idx")
    needed: tuple[str, ...] = ("qzeros", "scales")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._bits = int(settings.get("bits", 4))
        self._group_size = int(settings.get("group_size", 128))
        self._reordered = bool(settings.get("desc_act"))
        kind = settings.get("checkpoint_format") or settings.get("format") or "gptq"
        self._less_one = str(kind).lower() == "gptq"

    def read_meaning(self, source: WeightSource, stem: str) -> Meaning:
        scales = source.get(f"{stem}.scales").t()
        words = words_of(source, f"{stem}.qzeros")
        zeros = torch.stack(unpack(words, self._bits), dim=2).view(len(words), -1).t().to(torch.int16)
        if self._less_one:
            zeros = self._plus_one(zeros, stem)
        num_columns = len(words_of(source, f"{stem}.qweight")) * (32 // self._bits)
        return Meaning(
            self._bits, scales, zeros, self._groups(source, stem, num_columns, scales.shape[1])
        ).with_checked_groups(stem)

    def read_codes(self, source: WeightSource, stem: str, meaning: Meaning) -> Tensor:
        words = words_of(source, f"{stem}.qweight")
        numbers = [each.t() for each in unpack(words, self._bits)]
        return torch.stack(numbers, dim=2).view(words.shape[1], -1)

    def _plus_one(self, zeros: Tensor, stem: str) -> Tensor:
        """Zeros as they are meant. A zero of 0 has nothing that is one less: writers took it from its neighbour, and
        readers disagree on what such a word means."""
        if bool((zeros == (1 << self._bits) - 1).any()):
            raise BadModel(
                f"tensor {stem + '.qzeros'!r} has a zero point of 0 in checkpoint_format 'gptq', which cannot store "
                "it: write the checkpoint as gptq_v2, or use one with sym true"
            )
        return zeros + 1

    def _groups(self, source: WeightSource, stem: str, num_columns: int, num_groups: int) -> Tensor:
        name = f"{stem}.g_idx"
        if name in source.names():
            return listed_groups(source, name, num_columns)
        if self._reordered:
            raise BadModel(f"desc_act is true, but the checkpoint has no tensor {name!r}: copy it again")
        return in_order(f"{stem}.qweight", num_columns, self._group_size, num_groups)


class CompressedLayout:
    codes: tuple[str, ...] = ("weight_packed", "weight")
    others: tuple[str, ...] = ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
    needed: tuple[str, ...] = ("weight_scale",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        weights = [group["weights"] for group in settings["config_groups"].values()]
        self._bits = {int(each["num_bits"]) for each in weights}
        self._group_sizes = {int(each["group_size"]) for each in weights if each["strategy"] == "group"}
        self._symmetric = all(each.get("symmetric", True) for each in weights)

    def read_meaning(self, source: WeightSource, stem: str) -> Meaning:
        names = source.names()
        (rows, columns), bits = self._shape(source, stem)
        scales = source.get(f"{stem}.weight_scale")
        scales = scales.reshape(1, 1).expand(rows, 1) if scales.numel() == 1 else scales.view(len(scales), -1)
        zeros = torch.zeros(tuple(scales.shape), dtype=torch.int16)
        if f"{stem}.weight_zero_point" in names:
            zeros = _signed_zeros(source.get(f"{stem}.weight_zero_point"), bits, tuple(scales.shape), stem)
        elif not self._symmetric:
            raise BadModel(f"symmetric is false, but the checkpoint has no tensor '{stem}.weight_zero_point'")
        groups = self._groups(source, stem, columns, scales.shape[1])
        return Meaning(bits, scales, zeros + (1 << bits - 1), groups).with_checked_groups(stem)

    def read_codes(self, source: WeightSource, stem: str, meaning: Meaning) -> Tensor:
        if f"{stem}.weight_packed" not in source.names():
            return _whole_numbers(source, stem).view(torch.uint8) ^ 0x80
        words = words_of(source, f"{stem}.weight_packed")
        numbers = torch.stack(unpack(words, meaning.bits), dim=2)
        return numbers.view(len(words), -1)[:, : len(meaning.groups)].contiguous()

    def _shape(self, source: WeightSource, stem: str) -> tuple[tuple[int, int], int]:
        """Rows and columns, and bits of a code. Of packed codes, words for so many columns tell their bits."""
        if f"{stem}.weight_packed" not in source.names():
            whole = _whole_numbers(source, stem)
            return (len(whole), whole.shape[1]), 8
        words = words_of(source, f"{stem}.weight_packed")
        if f"{stem}.weight_shape" not in source.names():
            raise BadModel(f"the checkpoint has no tensor '{stem}.weight_shape'")
        shape = [int(size) for size in source.get(f"{stem}.weight_shape").flatten()]
        fits = [b for b in self._bits if len(shape) == 2 and -(-shape[1] * b // 32) == words.shape[1]]
        if len(fits) != 1 or shape[0] != len(words):
            raise BadModel(f"tensor '{stem}.weight_packed' is {tuple(words.shape)}, which are no codes of a {shape}")
        return (shape[0], shape[1]), fits[0]

    def _groups(self, source: WeightSource, stem: str, num_columns: int, num_groups: int) -> Tensor:
        name = f"{stem}.weight_g_idx"
        if name in source.names() and not bool((source.get(name) == -1).any()):  # -1: a place that was never filled
            return listed_groups(source, name, num_columns)
        sizes = {num_columns} if num_groups == 1 else self._group_sizes
        fits = [size for size in sizes if -(-num_columns // size) == num_groups]
        return in_order(f"{stem}.weight", num_columns, fits[0] if len(fits) == 1 else -1, num_groups)


def _whole_numbers(source: WeightSource, stem: str) -> Tensor:
    stored = source.get(f"{stem}.weight")
    if stored.dtype != torch.int8 or stored.dim() != 2:
        found = f"{tuple(stored.shape)} {stored.dtype}"
        raise BadModel(f"tensor '{stem}.weight' has a scale beside it, but is {found}: no matrix of int8")
    return stored


def _signed_zeros(stored: Tensor, bits: int, shape: tuple[int, ...], stem: str) -> Tensor:
    """Zero points as signed numbers of the shape of the scales. Early versions stored them unpacked."""
    if stored.dtype == torch.int32 and stored.dim() == 2:
        unpacked = torch.stack(unpack(stored, bits), dim=1).view(-1, stored.shape[1])[: shape[0]]
        stored = unpacked.to(torch.int16) - (1 << bits - 1)
    if stored.is_floating_point() or stored.numel() not in (1, shape[0] * shape[1]):
        found = f"{tuple(stored.shape)} {stored.dtype}"
        raise BadModel(f"tensor '{stem}.weight_zero_point' is {found}, for scales of {shape}")
    return stored.to(torch.int16).reshape(shape) if stored.numel() > 1 else stored.to(torch.int16).expand(shape)


def words_of(source: WeightSource, name: str) -> Tensor:
    """A tensor of 32-bit words in two dimensions; BadModel if it is something else."""
    words = source.get(name)
    if words.dtype != torch.int32 or words.dim() != 2:
        raise BadModel(f"tensor {name!r} is {tuple(words.shape)} {words.dtype}: no words of packed numbers")
    return words


def in_order(name: str, num_columns: int, group_size: int, num_groups: int) -> Tensor:
    """The group of each column, where neighbours share one; `group_size` -1: all columns do."""
    size = num_columns if group_size == -1 else group_size
    if -(-num_columns // max(1, size)) != num_groups:
        raise BadModel(f"{name!r} has {num_groups} groups of scales for {num_columns} columns in groups of {size}")
    return torch.arange(num_columns) // size


def listed_groups(source: WeightSource, name: str, num_columns: int) -> Tensor:
    """The group of each column, as the file lists them."""
    groups = source.get(name)
    if groups.is_floating_point() or tuple(groups.shape) != (num_columns,):
        raise BadModel(f"tensor {name!r} is {tuple(groups.shape)}, for {num_columns} columns")
    return groups.to(torch.int64)
