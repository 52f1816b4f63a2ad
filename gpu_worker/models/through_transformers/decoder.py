"""Any other Transformers decoder: the model's own code, with our paged attention in place of its attention.

A model might keep something else between steps (a recurrence, a convolution, a mask of its own kind). So `verify` runs
a prompt in pieces through the pages and compares the logits with those of the model's own attention.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import logging as transformers_logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from gpu_worker.models.checkpoint.weights import ReadTensors
from gpu_worker.models.decoders.decoder import Decoder, common_window
from gpu_worker.models.layer_programs.programs import LayerPrograms, programs_of
from gpu_worker.models.packed.packed_linear import LayerPacking
from gpu_worker.models.packed.packed_weights import PackedWeights
from gpu_worker.models.through_transformers.attention import IMPLEMENTATION, StepContext, attending
from gpu_worker.models.through_transformers.checks import (
    check_weights,
    check_windows,
    divide_frequencies,
    find_context,
)
from gpu_worker.models.through_transformers.latent import compressed
from gpu_worker.models.through_transformers.recurrence import Recurrences, keeping, replace_recurrences
from gpu_worker.models.through_transformers.states import StepStates
from gpu_worker.ops import AttentionOptions, Ops, TokenBatch, make_batch
from gpu_worker.ops.kv_format import SCALE_BYTES, KvShape
from gpu_worker.ops.state_format import NO_STATE, BlockStates, StateShape
from octavo.request.errors import BadModel, InvalidArgument

CHECK_PIECES = (7, 4, 1)  # how many tokens each piece of the prompt has that `verify` runs
CHECK_BLOCK = 8  # tokens of a block of that prompt
NO_KEYS = 1, 64  # the form of pages of a model without attention, of which only the bytes of the state are used
CHECK_TOLERANCE = 0.05  # of the largest logit: more than rounding explains in any dtype

transformers_logging.set_verbosity_error()  # what it warns of when it loads weights refuses the model here
transformers_logging.disable_progress_bar()  # a worker writes a log


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
    def _step(self, batch: TokenBatch, kv: Sequence[Tensor]) -> Iterator[StepContext]:
        step = StepContext(self._ops, batch, kv, self._places, self._options, self.window)
        if not kv:
            step.states = StepStates(batch, None, CHECK_BLOCK)
        elif self.state.parts:
            step.states = StepStates(batch, BlockStates(self.state, kv[self.num_layers :]), kv[0].shape[3])
        recurring = keeping(Recurrences(self._ops, step.states)) if step.states else nullcontext()
        with attending(step), compressed(self._model), recurring:
            programs = self.programs if kv and step.states else None
            if programs is not None and step.states and programs.begin(batch, kv):
                step.states.keep_elsewhere()
            try:
                yield step
            finally:
                if programs is not None:
                    programs.end()

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
        heads = {layer: step.shapes[layer] for layer in found if not step.windows[layer]}  # programs know no windows
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
