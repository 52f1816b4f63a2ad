"""The attention of a Transformers model over pages: what it calls in place of its own, and what it asks for masks with.

Transformers calls the registered attention function with one sequence that holds all tokens of the step. The context of
the running step says which pages each token belongs to.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn, zeros_like
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from gpu_worker.models.through_transformers.latent import layer_of
from gpu_worker.models.through_transformers.states import StepStates
from gpu_worker.ops import AttentionOptions, Ops, TokenBatch
from gpu_worker.ops.kv_format import paged_as
from octavo.request.errors import BadModel

IMPLEMENTATION = "octavo_paged"


@dataclass(slots=True)
class StepContext:
    """What the attention function needs beside its arguments."""

    ops: Ops
    batch: TokenBatch
    kv: Sequence[Tensor]  # empty: a probe, where only shapes count
    places: Mapping[int, int]  # of layers with attention in `kv`
    options: dict[Any, AttentionOptions]
    window: int = 0  # of the decoder: blocks behind it are not kept
    windows: dict[int, int] = field(default_factory=dict)  # by layer: the window that the model asked for
    states: StepStates | None = None  # what else layers remember
    masked: set[int] = field(default_factory=set)  # the windows of the masks that the model asked for
    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)  # by layer: (num_kv_heads, head_dim)

    def note(self, layer: int, keys: Tensor, values: Tensor, window: int) -> None:
        """Of a probe. BadModel if pages cannot hold what the layer has."""
        if layer in self.shapes:
            raise BadModel(f"layer {layer} attends more than once for a token, and pages hold one key and value of it")
        if keys.shape != values.shape:
            raise BadModel(f"layer {layer} has keys of shape {[*keys.shape[1:]]} and values of {[*values.shape[1:]]}")
        self.shapes[layer] = (keys.shape[1], keys.shape[2])
        self.windows[layer] = window

    def options_of(self, layer: int, asked: AttentionOptions) -> AttentionOptions:
        """Those that were asked for first, of all that are equal. BadModel for a longer window than the decoder has."""
        kind = (asked.scale, asked.window, asked.soft_cap, id(asked.sinks))
        if kind not in self.options:
            if self.window and not 0 < asked.window <= self.window:
                raise BadModel(
                    f"layer {layer} looks back {asked.window or 'to the start'}, not {self.window} as it did"
                )
            self.options[kind] = asked
        return self.options[kind]


_current: ContextVar[StepContext | None] = ContextVar("octavo_step", default=None)  # a step per thread


@contextmanager
def attending(step: StepContext) -> Iterator[None]:
    """Within this, the models that this thread runs attend to the pages of the step."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def current_batch() -> TokenBatch | None:
    """The tokens of the step that runs in this thread; None: none runs."""
    step = _current.get()
    return None if step is None else step.batch


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function: [1, num_heads, num_tokens, head_dim] in, [1, num_tokens, num_heads, head_dim] out."""
    step, layer = _current.get(), getattr(module, "layer_idx", None)
    if step is None or layer is None:
        raise BadModel("paged attention was called outside a step or by a module without layer_idx")
    if attention_mask is not None:  # not one of _no_mask
        raise BadModel(f"layer {layer} has a mask of its own, which pages do not know")
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    latent = layer_of(module)
    if latent is not None:
        scaling = queries.shape[-1] ** -0.5 if scaling is None else scaling
        queries, keys = latent.query(queries), latent.key(keys, values)
        values = keys
    if not step.kv:
        step.note(layer, keys, values, sliding_window or 0)
        attended = zeros_like(queries)
        return (attended if latent is None else latent.values(attended)).unsqueeze(0), None
    scale = queries.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options = step.options_of(layer, AttentionOptions(scale, sliding_window or 0, softcap or 0.0, sinks=s_aux))
    pages = paged_as(step.kv[step.places[layer]], keys.shape[1], keys.shape[2])
    step.ops.cache_write(pages, keys, values, step.batch)
    attended = step.ops.paged_attention(queries.contiguous(), pages, step.batch, options)
    return (attended if latent is None else latent.values(attended)).unsqueeze(0), None


def _no_mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """There is no mask, because pages need none. `local_size` is the window of the mask that there would be."""
    step = _current.get()
    if step is not None and local_size is not None:
        step.masked.add(local_size)


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
