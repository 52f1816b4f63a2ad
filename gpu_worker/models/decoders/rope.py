"""Rotary position embedding: the cosines and sines of every position, for the scalings models are published with."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.request.errors import BadModel

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")


def kind(config: Mapping[str, Any]) -> str:
    """The kind of scaling that a Transformers configuration names; Phi-3 has had other names for longrope."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    name = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if name == "mrope":  # of Qwen2-VL's first files: `mrope_section` says it all
        return "default"
    return "longrope" if name in ("su", "yarn") and "long_factor" in scaling else name


def far_and_near(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """The configuration as layers that see all keys read it, and as those with a window do; None: alike."""
    given = config.get("rope_parameters") or {}
    found = [given.get(kind) for kind in ("full_attention", "sliding_attention")]
    if any(found):
        far, near = ({**config, "rope_parameters": each or {}, "rope_scaling": None} for each in found)
        return far, near
    plain = {**config, "rope_parameters": None, "rope_scaling": None}
    if config.get("model_type") == "gemma3_text":
        theta = config.get("rope_local_base_freq") or 10000.0
        return {"rope_theta": 1e6, **config}, {**plain, "rope_theta": theta}
    return config, plain if config.get("model_type") == "olmo3" else None


def stretch(config: Mapping[str, Any]) -> float:
    """By what scores of latent attention are multiplied twice, where positions are scaled."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    weight = 0.0 if kind(config) == "default" else float(scaling.get("mscale_all_dim") or 0.0)
    return _grow(weight, float(scaling.get("factor") or 1.0))


def _grow(weight: float, factor: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """How positions become angles. Parameters that a kind does not use are ignored."""

    dim: int  # dimensions of a head that are rotated
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0  # positions of the model before it was scaled
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    factors: tuple[float, ...] = ()  # of kind "factors": the divisor of each frequency, as GGUF files list them
    short_factor: tuple[float, ...] = ()  # of kind "longrope": the same, for sequences up to original_context tokens
    long_factor: tuple[float, ...] = ()  # and for sequences that may be longer
    mrope_section: tuple[int, ...] = ()  # where pictures are: how many pairs turn by time, by row and by column
    mrope_interleaved: bool = False  # whether these take turns

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> "RopeParameters":
        """Reads a Transformers configuration: of version 5 (rope_parameters), or older (rope_theta, rope_scaling)."""
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        partial = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        context = int(config.get("max_position_embeddings") or 0)
        original = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        given = {name: scaling[name] for name in cls.__dataclass_fields__ if scaling.get(name) is not None}
        lists = ("short_factor", "long_factor", "mrope_section")
        given |= {name: tuple(given[name]) for name in lists if name in given}
        if (named := kind(config)) == "longrope":
            given.setdefault("factor", context / int(original or context))
        return cls(
            **given
            | {
                "dim": int(head_dim * partial),
                "theta": float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
                "kind": named,
                "original_context": int(original or context),
            }
        )

    def is_long(self, num_positions: int) -> bool:
        """Whether a model that serves so many positions turns by the factors for long sequences."""
        return self.kind == "longrope" and num_positions > self.original_context

    def table(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [num_positions, dim], both halves alike."""
        positions = torch.arange(num_positions, dtype=torch.float32)
        if self.kind == "longrope":
            angles = torch.outer(positions, self._longrope(self.is_long(num_positions)))
        else:
            angles = self._angles(positions)
        angles = torch.cat((angles, angles), dim=-1)
        scale = self._attention_scale()
        return angles.cos() * scale, angles.sin() * scale

    def axes(self) -> Tensor:
        """Which of a token's positions (0: time, 1: row, 2: column) each pair of dimensions turns by, int64 [pairs]."""
        pairs, sections = torch.arange(self.dim // 2), torch.tensor(self.mrope_section, dtype=torch.int64)
        if len(sections) != 3 or int(sections.sum()) != len(pairs) or int(sections.min()) < 0:
            raise BadModel(f"mrope_section: {list(self.mrope_section)} do not divide {len(pairs)} pairs of dimensions")
        if not self.mrope_interleaved:
            return torch.repeat_interleave(torch.arange(3), sections)
        return torch.where(pairs < 3 * sections[pairs % 3], pairs % 3, 0)

    def _frequencies(self, theta: float | Tensor) -> Tensor:
        steps = torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim
        return 1.0 / (theta**steps)

    def _angles(self, positions: Tensor) -> Tensor:
        if self.kind == "dynamic":
            return positions[:, None] * self._dynamic(positions)
        plain = self._frequencies(self.theta)
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "llama3":
            plain = self._llama3(plain)
        elif self.kind == "yarn":
            plain = self._yarn(plain)
        elif self.kind == "factors":
            if len(self.factors) != len(plain):
                raise BadModel(f"{len(self.factors)} factors of rotary positions for {len(plain)} frequencies")
            plain = plain / torch.tensor(self.factors, dtype=torch.float32)
        elif self.kind != "default":
            raise BadModel(f"rope_type: {self.kind!r} is not one of {', '.join(KINDS)}")
        return torch.outer(positions, plain)

    def _dynamic(self, positions: Tensor) -> Tensor:
        """NTK scaling by length. Each position turns as if it were the last, so cached keys never have to change."""
        length = (positions + 1).clamp(min=self.original_context)
        stretch = self.factor * length / self.original_context - (self.factor - 1)
        return self._frequencies((self.theta * stretch ** (self.dim / (self.dim - 2)))[:, None])

    def _longrope(self, is_long: bool) -> Tensor:
        factors = torch.tensor(self.long_factor if is_long else self.short_factor, dtype=torch.float32)
        if factors.shape != (self.dim // 2,):
            raise BadModel(f"longrope: {len(factors)} factors for {self.dim // 2} frequencies")
        steps = torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim
        return 1.0 / (factors * self.theta**steps)

    def _llama3(self, plain: Tensor) -> Tensor:
        """Long waves are stretched, short waves stay, and waves between are mixed of both."""
        wavelength = 2 * math.pi / plain
        low = self.original_context / self.low_freq_factor
        high = self.original_context / self.high_freq_factor
        share = (self.original_context / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        mixed = (1 - share) * plain / self.factor + share * plain
        stretched = torch.where(wavelength > low, plain / self.factor, plain)
        between = (wavelength >= high) & (wavelength <= low)
        return torch.where(between, mixed, stretched)

    def _yarn(self, plain: Tensor) -> Tensor:
        """Dimensions that turn often keep their frequency, others are interpolated, with a ramp between."""

        def dimension(rotations: float) -> float:
            span = self.original_context / (rotations * 2 * math.pi)
            return self.dim * math.log(span) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        high = high + 0.001 if low == high else high
        ramp = ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return plain / self.factor * ramp + plain * (1 - ramp)

    def _attention_scale(self) -> float:
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context)) if self.factor > 1 else 1.0
        if self.mscale and self.mscale_all_dim:
            return _grow(self.mscale, self.factor) / _grow(self.mscale_all_dim, self.factor)
        return _grow(1.0, self.factor)
