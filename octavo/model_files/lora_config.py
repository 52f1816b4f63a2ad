"""adapter_config.json as PEFT writes it: how an adapter is scaled, and which settings octavo does not compute."""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.request.errors import BadModel

MAX_RANK = 256
# Settings of training and of bookkeeping: they change nothing of what an adapter computes.
_NOTES = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "peft_version"),
        *("revision", "runtime_config", "target_modules", "exclude_modules", "task_type", "layers_pattern"),
        *("layers_to_transform", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    }
)
_PATTERNS = ("rank_pattern", "alpha_pattern")
_COMPUTED = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights", "bias", *_PATTERNS})
_UNSET: tuple[object, ...] = (None, False, "", [], {})
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # other starts change the weights of the model
_NAMES = re.compile(r"\^?(?:\w|\\?\.)+")  # of modules, as PEFT's patterns spell them where they are no patterns


@dataclass(frozen=True, slots=True)
class LoraScaling:
    """Ranks and scales by the names of modules, such as model.layers.0.self_attn.q_proj."""

    rank: int
    alpha: float
    rooted: bool  # the scale is alpha / √rank, and not alpha / rank
    ranks: Mapping[str, int] = field(default_factory=dict)  # of modules whose names end so; the first one counts
    alphas: Mapping[str, float] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        return self._scale(self.rank, self.alpha)

    def rank_of(self, module: str) -> int:
        return self.ranks.get(_match(module, self.ranks), self.rank)

    def scale_of(self, module: str) -> float:
        return self._scale(self.rank_of(module), self.alphas.get(_match(module, self.alphas), self.alpha))

    def pack(self) -> bytes:
        """What counts for a token where no module has a scale of its own."""
        return struct.pack("<Id?", self.rank, self.alpha, self.rooted)

    def _scale(self, rank: int, alpha: float) -> float:
        return alpha / math.sqrt(rank) if self.rooted else alpha / rank


def read_scaling(config: Any) -> LoraScaling:
    """Raises BadModel for a setting that octavo does not compute, by its name."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise BadModel(f"peft_type {_shown(config, 'peft_type')} is not LORA")
    for name in config:
        if name not in _COMPUTED and name not in _NOTES and config[name] not in _UNSET:
            raise BadModel(f"{name} {_shown(config, name)} is not computed here: train or convert it without")
    if config.get("bias", "none") != "none":
        raise BadModel(f"bias {_shown(config, 'bias')} is not computed here: only none")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        what = f"init_lora_weights {_shown(config, 'init_lora_weights')}"
        raise BadModel(f"{what} changes the weights of the model: save it as a plain LoRA")
    ranks, alphas = (_pattern(config, name) for name in _PATTERNS)
    return LoraScaling(
        _rank(config, "r", config.get("r")),
        _alpha(config, "lora_alpha", config.get("lora_alpha")),
        bool(config.get("use_rslora", False)),
        {name: _rank(config, "rank_pattern", value) for name, value in ranks.items()},
        {name: _alpha(config, "alpha_pattern", value) for name, value in alphas.items()},
    )


def _rank(config: Mapping[str, Any], name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise BadModel(f"{name} {_shown(config, name)} is not a whole number from 1 to {MAX_RANK}")
    return value


def _alpha(config: Mapping[str, Any], name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadModel(f"{name} {_shown(config, name)} is no number")
    return float(value)


def _pattern(config: Mapping[str, Any], name: str) -> dict[str, object]:
    """What a pattern says, by names of modules. PEFT takes any expression; octavo takes names."""
    given = config.get(name)
    if given in _UNSET:
        return {}
    if not isinstance(given, dict):
        raise BadModel(f"{name} {_shown(config, name)} has no names of modules")
    for each in given:
        if not _NAMES.fullmatch(each):
            raise BadModel(f"{name} has the expression {each[:80]!r}: only names of modules are read; write them out")
    return {each.replace("\\.", "."): value for each, value in given.items()}


def _match(module: str, names: Mapping[str, object]) -> str:
    """The first of the names with which the module's name ends, at a dot; empty: none."""
    for name in names:
        if module == name.removeprefix("^") or (name[0] != "^" and module.endswith(f".{name}")):
            return name
    return ""


def _shown(config: object, name: str) -> str:
    value = config.get(name) if isinstance(config, dict) else None
    return repr(value)[:80]
