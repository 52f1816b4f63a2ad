"""Which layers of a Transformers model run as programs, and their place in the model.

The layers of a model whose kinds are all known here do in a step what their programs say, and outside of a step, or on
pages that programs do not take, their own code. A program goes on from layer to layer; only experts are left to their
own code, between two programs. `TransformersDecoder.verify` compares what comes of it with the model's own attention.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpu_worker.models.layer_programs import mixers
from gpu_worker.models.layer_programs.recipe import LayerRecipe, Slice, StateParts, UnknownLayer
from gpu_worker.ops import Ops, TokenBatch
from gpu_worker.ops.kv_format import paged_as
from gpu_worker.ops.native_cpu import NativeCpuOps
from gpu_worker.ops.state_format import StateShape

log = logging.getLogger(__name__)

PROGRAM_BITS = 1  # rises when programs compute other bits than before
Write = Callable[[LayerRecipe, Any, Slice, StateParts, float], None]
MIXERS: Mapping[str, Write] = {
    "Lfm2ShortConv": mixers.write_short_convolution,
    "Lfm2MoeShortConv": mixers.write_short_convolution,
    "Qwen3_5GatedDeltaNet": mixers.write_delta,
    "Qwen3_5MoeGatedDeltaNet": mixers.write_delta,
    "Qwen3NextGatedDeltaNet": mixers.write_delta,
    "GraniteMoeHybridMambaLayer": mixers.write_mamba2,
    "FalconH1Mixer": mixers.write_mamba2,
    "BambaMixer": mixers.write_mamba2,
    "Mamba2Mixer": mixers.write_mamba2,
    "JambaMambaMixer": mixers.write_mamba1,
    "MambaMixer": mixers.write_mamba1,
}
_FAMILIES = ["Bamba", "FalconH1", "GraniteMoeHybrid", "Jamba", "Lfm2", "Lfm2Moe", "Qwen3_5", "Qwen3_5Moe", "Qwen3Next"]
ATTENTION, MLPS = ({f"{family}{kind}" for family in _FAMILIES} for kind in ("Attention", "MLP"))


@dataclass(frozen=True, slots=True)
class _Kind:
    """The names in a layer, and what its sums are multiplied with."""

    norm: str
    mlp_norm: str
    mlp: str  # empty: there is none
    mixers: tuple[str, ...]  # those that it has; they add to the states side by side
    times: str = ""  # the attribute with the multiplier of what is added
    entering: Mapping[str, str] = field(default_factory=dict)  # by mixer: of what it is given
    leaving: Mapping[str, str] = field(default_factory=dict)  # by mixer: of what it adds
    experts: str = ""  # the attribute with experts beside the MLP
    more_returned: tuple[None, ...] | None = None  # behind the states; None: they are returned alone


_LFM2 = _Kind("operator_norm", "ffn_norm", "feed_forward", ("conv", "self_attn"))
_QWEN = _Kind("input_layernorm", "post_attention_layernorm", "mlp", ("linear_attn", "self_attn"))
_PRE_FF = ("input_layernorm", "pre_ff_layernorm", "feed_forward", ("mamba", "self_attn"))
_ALONE = _Kind("norm", "", "", ("mixer",))
KINDS = {
    "Lfm2DecoderLayer": _LFM2,
    "Lfm2MoeDecoderLayer": _LFM2,
    "Qwen3_5DecoderLayer": _QWEN,
    "Qwen3_5MoeDecoderLayer": _QWEN,
    "Qwen3NextDecoderLayer": _QWEN,
    "GraniteMoeHybridDecoderLayer": _Kind(
        *("input_layernorm", "post_attention_layernorm", "shared_mlp", ("mamba", "self_attn")),
        times="residual_multiplier",
        experts="block_sparse_moe",
    ),
    "FalconH1DecoderLayer": _Kind(
        *_PRE_FF,
        entering={"self_attn": "attention_in_multiplier"},
        leaving={"mamba": "ssm_out_multiplier", "self_attn": "attn_out_multiplier"},
        more_returned=(),
    ),
    "BambaDecoderLayer": _Kind(*_PRE_FF, more_returned=(None,)),
    "JambaAttentionDecoderLayer": _Kind(*_PRE_FF),
    "JambaMambaDecoderLayer": _Kind(*_PRE_FF),
    "MambaBlock": _ALONE,
    "Mamba2Block": _ALONE,
}


class LayerPrograms:
    """The programs of a model's layers. Only one thread may run steps at a time."""

    def __init__(self, model: nn.Module, ops: NativeCpuOps, state: StateShape, heads: Mapping[int, tuple[int, int]]):
        """`heads`: by layer with attention to all tokens, in the order of pages, those of keys and their dimensions.

        UnknownLayer if some layer is none of those that programs run; the model is then as it was.
        """
        self._ops = ops
        self._room = ops.extension.ProgramRoom()
        self._heads = tuple(heads.values())
        self._places = {layer: place for place, layer in enumerate(heads)}
        self._arena: Sequence[Tensor] | None = None
        self._runs = False
        base = cast("Any", model).base_model
        self._rotated = max(
            (2 * len(each.inv_freq) for each in base.children() if hasattr(each, "inv_freq")), default=0
        )
        self._kept = StateParts(state)
        self._hidden = int(cast("Any", model).config.get_text_config().hidden_size)
        self._recipe: LayerRecipe | None = None
        self._recipes: list[LayerRecipe] = []
        written = [(layer, self._write(index, layer)) for index, layer in enumerate(base.layers)]
        self._kept.end()
        programs = {id(recipe): recipe.program() for recipe in self._recipes}
        for layer, steps in written:
            made = [programs.get(id(step), step) for step in steps]
            layer.forward = self._forward(layer.forward, made, KINDS[type(layer).__name__].more_returned)

    def begin(self, batch: TokenBatch, kv: Sequence[Tensor]) -> bool:
        """A step begins: whether its layers run as programs. `kv` is as `Decoder.forward` has it."""
        dims = {dim for _, dim in self._heads}
        if not all(self._ops.batch_invariant(kv[0], dim) for dim in dims):
            return False
        if kv is not self._arena:
            pages = [paged_as(layer, *heads) for layer, heads in zip(kv, self._heads, strict=False)]
            states = [layer.view(torch.uint8).flatten(1) for layer in kv[len(pages) :]]
            self._room.use(pages, states, kv[0].shape[3])
            self._arena = kv
        self._batch = batch  # whose memory the room refers to
        self._room.begin(batch.cu_q, batch.seq_lens, batch.block_tables, batch.slots)
        self._runs = True
        return True

    def end(self) -> None:
        self._runs = False

    def _write(self, index: int, layer: Any) -> list[Any]:
        """Writes down what a layer does. What begins with it: recipes, and functions of the states."""
        kind = KINDS.get(type(layer).__name__)
        if kind is None or {each.dtype for each in layer.parameters()} != {torch.float32}:
            raise UnknownLayer(f"{type(layer).__name__} is none that programs run, or not in float32")
        steps: list[Any] = []
        recipe = self._open(steps)
        times = float(getattr(layer, kind.times)) if kind.times else 1.0
        with recipe.space():
            normed = recipe.take_numbers(self._hidden)
            mixers.write_norm(recipe, getattr(layer, kind.norm), recipe.states, normed)
            for name in kind.mixers:
                mixer = getattr(layer, name, None)
                if mixer is None:
                    continue
                if (entering := getattr(layer, kind.entering.get(name, ""), 1)) != 1:
                    recipe.do("scale", normed, torch.tensor([float(entering)]))
                leaving = float(getattr(layer, kind.leaving.get(name, ""), 1))
                with recipe.space():
                    self._write_mixer(recipe, index, mixer, normed, times * leaving)
        if not kind.mlp:
            return steps
        mlp, norm = getattr(layer, kind.mlp), getattr(layer, kind.mlp_norm)
        experts = getattr(layer, kind.experts, None) if kind.experts else None
        if type(mlp).__name__ in MLPS and experts is None:
            with recipe.space():
                normed = recipe.take_numbers(self._hidden)
                mixers.write_norm(recipe, norm, recipe.states, normed)
                mixers.write_mlp(recipe, mlp, normed, times)
        else:
            self._recipe = None
            steps.append(_own_mlp(norm, [mlp] if experts is None else [experts, mlp], times))
        return steps

    def _open(self, steps: list[Any]) -> LayerRecipe:
        """The recipe that the layer before has left open, or a new one."""
        if self._recipe is None:
            self._recipe = LayerRecipe(self._ops.extension, self._hidden)
            self._recipes.append(self._recipe)
            steps.append(self._recipe)
        return self._recipe

    def _write_mixer(self, recipe: LayerRecipe, index: int, mixer: Any, normed: Slice, times: float) -> None:
        name = type(mixer).__name__
        if name in MIXERS:
            MIXERS[name](recipe, mixer, normed, self._kept, times)
        elif name in ATTENTION and index in self._places:
            place = self._places[index]
            mixers.write_attention(recipe, mixer, normed, place, self._rotated, self._heads[place], times)
        else:
            raise UnknownLayer(f"{name} is none that programs run")

    def _forward(
        self, own: Callable[..., Any], steps: Sequence[Any], more_returned: tuple[None, ...] | None
    ) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *args: Any, **more: Any) -> Any:
            if not self._runs:
                return own(hidden_states, *args, **more)
            states = hidden_states[0]
            angles = tuple(each[0] for each in more["position_embeddings"]) if self._rotated else ()
            for step in steps:
                if callable(step):
                    states += step(states)
                else:
                    step.run(states, self._room, *angles)
            return hidden_states if more_returned is None else (hidden_states, *more_returned)

        return forward


def _own_mlp(norm: nn.Module, modules: Sequence[nn.Module], times: float) -> Callable[[Tensor], Tensor]:
    """What experts, and what is beside them, add to the states [num_tokens, hidden]."""

    def compute(states: Tensor) -> Tensor:
        normed = norm(states.unsqueeze(0))
        found = [module(normed) for module in modules]
        first = [each[0] if isinstance(each, tuple) else each for each in found]
        total: Tensor = sum(first[1:], first[0])
        return total.view_as(states) * times

    return compute


def programs_of(
    model: nn.Module, ops: Ops, state: StateShape, heads: Mapping[int, tuple[int, int]]
) -> LayerPrograms | None:
    """Those of a model with a state, or None: its layers run by their own code."""
    if not state.parts or not isinstance(ops, NativeCpuOps):
        return None
    try:
        return LayerPrograms(model, ops, state, heads)
    except (UnknownLayer, AttributeError, ValueError) as error:
        log.info("%s: its layers run by their own code (%s)", type(model).__name__, error)
        return None
