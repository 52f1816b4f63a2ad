"""Any other Transformers decoder: the model's own code, with our paged attention in place of its attention.

Transformers calls the registered attention function with one sequence that holds all tokens of the step. The context of
the running step says which pages each token belongs to. A model might keep something else between steps (a recurrence,
a convolution, a mask of its own kind). So `verify` runs a prompt in pieces through the pages and compares the logits
with those of the model's own attention.
"""

import inspect
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import logging as transformers_logging
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from gpu_worker.models.checkpoint.weights import ReadTensors
from gpu_worker.models.decoders.decoder import Decoder, common_window
from gpu_worker.models.layer_programs.programs import LayerPrograms, programs_of
from gpu_worker.models.packed.packed_linear import LayerPacking
from gpu_worker.models.packed.packed_weights import PackedWeights
from gpu_worker.models.through_transformers.checks import (
    check_weights,
    check_windows,
    divide_frequencies,
    find_context,
)
from gpu_worker.models.through_transformers.latent import compressed, layer_of
from gpu_worker.models.through_transformers.recurrence import Recurrences, keeping, replace_recurrences
from gpu_worker.models.through_transformers.states import StepStates
from gpu_worker.ops import AttentionOptions, Ops, TokenBatch, make_batch
from gpu_worker.ops.kv_format import SCALE_BYTES, KvShape, paged_as
from gpu_worker.ops.state_format import NO_STATE, BlockStates, StateShape
from octavo.request.errors import BadModel, InvalidArgument

log = logging.getLogger(__name__)


IMPLEMENTATION = "octavo_paged"
CHECK_PIECES = (7, 4, 1)  # how many tokens each piece of the prompt has that `verify` runs
CHECK_BLOCK = 8  # tokens of a block of that prompt
NO_KEYS = 1, 64  # the form of pages of a model without attention, of which only the bytes of the state are used
CHECK_TOLERANCE = 0.05  # of the largest logit: more than rounding explains in any dtype


@dataclass(slots=True)
class _StepContext:
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


_current: ContextVar[_StepContext | None] = ContextVar("octavo_step", default=None)  # a step per thread


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
        if layer in step.shapes:
            raise BadModel(f"layer {layer} attends more than once for a token, and pages hold one key and value of it")
        if keys.shape != values.shape:
            raise BadModel(f"layer {layer} has keys of shape {[*keys.shape[1:]]} and values of {[*values.shape[1:]]}")
        step.shapes[layer] = (keys.shape[1], keys.shape[2])
        step.windows[layer] = sliding_window or 0
        attended = torch.zeros_like(queries)
        return (attended if latent is None else latent.values(attended)).unsqueeze(0), None
    scale = queries.shape[-1] ** -0.5 if scaling is None else float(scaling)
    kind = (scale, sliding_window or 0, softcap or 0.0, id(s_aux))
    if kind not in step.options:
        if step.window and not 0 < (sliding_window or 0) <= step.window:
            raise BadModel(f"layer {layer} looks back {sliding_window or 'to the start'}, not {step.window} as it did")
        step.options[kind] = AttentionOptions(scale, sliding_window or 0, softcap or 0.0, sinks=s_aux)
    pages = paged_as(step.kv[step.places[layer]], keys.shape[1], keys.shape[2])
    step.ops.cache_write(pages, keys, values, step.batch)
    attended = step.ops.paged_attention(queries.contiguous(), pages, step.batch, step.options[kind])
    return (attended if latent is None else latent.values(attended)).unsqueeze(0), None


def _no_mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """There is no mask, because pages need none. `local_size` is the window of the mask that there would be."""
    step = _current.get()
    if step is not None and local_size is not None:
        step.masked.add(local_size)


transformers_logging.set_verbosity_error()  # what it warns of when it loads weights refuses the model here
transformers_logging.disable_progress_bar()  # a worker writes a log
AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


class TransformersDecoder(Decoder):
    """A Decoder around a Transformers model whose attention goes through its attention interface."""

    capturable = False  # the model's code may look at numbers, or remember them, where a graph would not
    batch_invariant = False  # the model's matrix products are rounded by their shape
    auto_model: Any = AutoModelForCausalLM
    attention: str | Mapping[str, str] = IMPLEMENTATION
    packed: PackedWeights | None = None  # of layers that are not torch's
    programs: LayerPrograms | None = None  # of the extension, which its layers are in steps

    def __init__(self, model: nn.Module, ops: Ops, device: torch.device) -> None:
        self._model = model
        self._ops = ops
        self._device = device
        self._options: dict[Any, AttentionOptions] = {}
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._selects_rows = "logits_to_keep" in accepted
        config = cast("Any", model).config.get_text_config()
        self.name = f"transformers:{config.model_type}"
        self.vocab_size = int(config.vocab_size)
        self.context_tokens = find_context(self.name, config)
        self.window = 0
        self.state = NO_STATE
        self._places: dict[int, int] = {}
        replace_recurrences(model)
        self.num_layers, self.num_kv_heads, self.head_dim = self._probe(config)
        self._states: Tensor | None = None  # what the head was given in the last call of forward
        head = cast("Any", model).get_output_embeddings()
        if head is not None:
            head.register_forward_pre_hook(self._note_states)
        self.hidden_size = int(getattr(head, "in_features", 0))

    @classmethod
    def load(
        cls, directory: Path, dtype: torch.dtype, ops: Ops, device: torch.device, **more: Any
    ) -> "TransformersDecoder":
        """Loads safetensors from `directory`, without code from it, and verifies. BadModel says why it cannot run.

        `more` are further arguments of a subclass.
        """
        try:
            model, weights = cls.auto_model.from_pretrained(
                directory,
                output_loading_info=True,
                dtype=dtype,
                attn_implementation=cls.attention,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
        except KeyError as error:
            raise BadModel(f"{directory.name}: this model's attention cannot be replaced ({error})") from error
        except (ValueError, OSError, ImportError, NotImplementedError, RuntimeError) as error:
            first_line = str(error).partition("\n")[0]  # more would be a list of everything that Transformers knows
            raise BadModel(f"{directory.name}: {first_line}") from error
        return cls._verified(directory.name, model, weights, ops, device, **more)

    @classmethod
    def of_tensors(
        cls,
        name: str,
        config: Mapping[str, Any],
        read: ReadTensors,
        dtype: torch.dtype,
        ops: Ops,
        device: torch.device,
        rope_factors: Tensor | None = None,
        packing: LayerPacking | None = None,
    ) -> "TransformersDecoder":
        """Makes the model of a configuration and of its tensors in `dtype`, whose memory it uses, and verifies.

        `packing` makes layers of those that `read` leaves out. `rope_factors` divide the frequencies of its
        rotary positions. BadModel says why it cannot run.
        """
        packed = None
        try:
            settings = AutoConfig.for_model(**config)
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
            with torch.device("meta"):
                layers = kind(settings)
            shapes = {} if packing is None else packing.shapes(layers)
            left_out = set() if packing is None else packing.replaced(shapes) | packing.copies(layers)
            tensors = read(left_out, layers.state_dict().keys())
            nothing = torch.zeros((), dtype=dtype)
            model, weights = kind.from_pretrained(
                None,
                config=settings,
                state_dict=tensors | {each: nothing.expand(shape) for each, shape in shapes.items()},
                output_loading_info=True,
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
            if packing is not None and shapes:
                packed = packing.pack(model, shapes)
        except (KeyError, ValueError, OSError, RuntimeError) as error:
            raise BadModel(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        if rope_factors is not None:
            divide_frequencies(name, model, rope_factors)
        decoder = cls._verified(name, model, weights, ops, device)
        if packed is not None:
            decoder.packed = packed
            decoder.name = f"{decoder.name} ({packed.describe()})"
        return decoder

    @classmethod
    def _verified(
        cls, name: str, model: nn.Module, weights: Mapping[str, Any], ops: Ops, device: torch.device, **more: Any
    ) -> "TransformersDecoder":
        check_weights(name, weights)
        try:
            decoder = cls(model.eval().to(device), ops, device, **more)
            decoder.verify()
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            reason = f"its own code failed on a short prompt ({type(error).__name__}: {error})"
            raise BadModel(f"{name}: {reason}") from error
        return decoder

    def forward(self, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Tensor:
        with self._step(batch, kv):
            logits = self._logits(self._inputs(batch), rows)
        if self._states is not None and not self._selects_rows:
            self._states = self._states[rows]
        return logits

    def states(self, forwarded: Tensor, first: int) -> Tensor:
        if self._states is None:
            raise RuntimeError(f"{self.name}: its head was not called")
        return self._states[first:]

    def _note_states(self, head: nn.Module, given: tuple[Tensor, ...]) -> None:
        """Keeps what the head is given: a row for each that is wanted, or for each token."""
        self._states = given[0].reshape(-1, given[0].shape[-1])

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    @torch.inference_mode()
    def verify(self) -> None:
        """Runs a prompt in pieces through pages. BadModel if the model's own attention gives other logits."""
        num_tokens, block_size = sum(CHECK_PIECES), CHECK_BLOCK
        tokens = [(i * 7919 + 13) % self.vocab_size for i in range(num_tokens)]
        shape = KvShape(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            block_size=block_size,
            head_dim=self.head_dim,
            dtype=next(self._model.parameters(), torch.empty(0)).dtype,
            state=self.state,
        )
        table = list(range(-(-num_tokens // block_size)))[::-1]
        kv = list(shape.allocate_arena(len(table), self._device).unbind(0))
        start = 0
        for length in CHECK_PIECES:
            end = start + length
            slots = [table[p // block_size] * block_size + p % block_size for p in range(start, end)]
            positions = list(range(start, end))
            batch = make_batch(tokens[start:end], positions, slots, [length], [end], [table], self._device)
            last = self.forward(batch, kv, torch.tensor([length - 1], device=self._device))
            start = end
        expected = self._own_logits(tokens)
        error = float((last.float() - expected).abs().max() / expected.abs().max())
        if not error <= CHECK_TOLERANCE:
            raise BadModel(
                f"{self.name}: through pages its logits differ by {error:.3g} of the largest; it cannot be served"
            )

    def _own_logits(self, tokens: list[int]) -> Tensor:
        """The logits of the last token, by the model's eager attention."""
        ids = torch.tensor(tokens, device=self._device)
        switch = cast("Any", self._model).set_attn_implementation  # nn.Module does not know it
        switch("eager")
        try:
            rows = torch.tensor([len(tokens) - 1], device=self._device)
            places = torch.arange(len(tokens), device=self._device)
            return self._logits({"input_ids": ids.unsqueeze(0), "position_ids": places.unsqueeze(0)}, rows).float()
        finally:
            switch(self.attention)

    def _inputs(self, batch: TokenBatch) -> dict[str, Tensor]:
        """The arguments by which the model is given the tokens of a batch."""
        return {"input_ids": batch.token_ids.unsqueeze(0), "position_ids": batch.positions.unsqueeze(0)}

    def _logits(self, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
        options: dict[str, Any] = {"logits_to_keep": rows} if self._selects_rows else {}
        if not self._takes_positions:
            inputs = {name: values for name, values in inputs.items() if name != "position_ids"}
        result = self._model(**inputs, use_cache=False, **options)
        logits: Tensor = result.logits[0]
        return logits if self._selects_rows else logits[rows]

    @contextmanager
    def _step(self, batch: TokenBatch, kv: Sequence[Tensor]) -> Iterator[_StepContext]:
        step = _StepContext(self._ops, batch, kv, self._places, self._options, self.window)
        if not kv:
            step.states = StepStates(batch, None, CHECK_BLOCK)
        elif self.state.parts:
            step.states = StepStates(batch, BlockStates(self.state, kv[self.num_layers :]), kv[0].shape[3])
        token = _current.set(step)
        try:
            if kv and step.states and self.programs is not None and self.programs.begin(batch, kv):
                step.states.keep_elsewhere()
            with (
                compressed(self._model),
                keeping(Recurrences(self._ops, step.states)) if step.states else nullcontext(),
            ):
                yield step
        finally:
            _current.reset(token)
            if self.programs is not None:
                self.programs.end()

    @torch.inference_mode()
    def _probe(self, config: Any) -> tuple[int, int, int]:
        """The number of layers, key-value heads and dimensions of a head that reach the attention function.

        Notes what else layers remember, too.
        """
        batch = make_batch([0, 0], [0, 1], [-1, -1], [2], [2], [[0]], self._device)
        with self._step(batch, []) as step:
            self._logits(self._inputs(batch), torch.tensor([1], device=self._device))
        num_layers, found = int(config.num_hidden_layers), sorted(step.shapes)
        self.state = StateShape(tuple(step.states.asked)) if step.states else NO_STATE
        if not self._takes_positions and (found or not self.state.parts):
            raise BadModel(
                f"{type(self._model).__name__} takes no positions, and a step has tokens of several sequences"
            )
        if found != list(range(num_layers)) and not self.state.parts:
            raise BadModel(f"{self.name}: {len(step.shapes)} of {num_layers} layers use the attention interface")
        shapes = set(step.shapes.values())
        if len(shapes) > 1 and self._device.type != "cpu":
            reason = "they have been run on CPUs alone so far: say cpu"
            raise InvalidArgument("device", f"{self.name}: its layers have keys of several shapes, and {reason}")
        self._places.update((layer, place) for place, layer in enumerate(found))
        heads = {layer: step.shapes[layer] for layer in found}
        self.programs = programs_of(self._model, self._ops, self.state, heads)
        check_windows(self.name, config, step.windows, step.masked)
        if not self.state.parts:  # a state lies in the block of the last token: all blocks are kept with it
            self.window = common_window(step.windows.values())
        return len(found), *(_roomy(self.name, shapes) if found else NO_KEYS)


def _roomy(name: str, shapes: Collection[tuple[int, int]]) -> tuple[int, int]:
    """The one of some layers' heads and dimensions whose pages have room for the others, also with scales in int8."""

    def room(shape: tuple[int, int]) -> tuple[int, int]:
        return shape[0] * shape[1], shape[0] * (shape[1] + SCALE_BYTES)

    for shape in shapes:
        if all(own >= other for each in shapes for own, other in zip(room(shape), room(each), strict=True)):
            return shape
    raise BadModel(
        f"{name}: layers have keys of shapes {sorted(shapes)}, and the pages of none have room for the others"
    )
