"""T5, BART and their like: Transformers' own encoder and decoder, with pages in the place of the decoder's attention.

The first tokens of a sequence are those that the encoder reads. Their slots hold the keys and values of the decoder's
*cross attention*, which are made once of what the encoder gives. The tokens of the decoder follow in the same blocks,
with the keys and values of its self attention. So whatever is done with blocks is done with both.
"""

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import AttentionInterface

from gpu_worker.models.decoders.decoder import EncodeTokens, by_registers
from gpu_worker.models.layer_programs.stacks import programs_of_stacks
from gpu_worker.models.packed.packed_linear import LinearPacking, PackedLinear
from gpu_worker.models.through_transformers.decoder import CHECK_BLOCK, CHECK_TOLERANCE, TransformersDecoder
from gpu_worker.models.through_transformers.encoder_step import EncoderStep, Encoding, PositionBias, Role, with_biases
from gpu_worker.ops import AttentionOptions, Ops, TokenBatch, make_batch
from gpu_worker.ops.batch import EncodedRows
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.ops.state_format import NO_STATE
from octavo.request.errors import BadModel
from octavo.text.encoded_prompt import EncoderSupport

log = logging.getLogger(__name__)

IMPLEMENTATION = "octavo_encoder_decoder"
CROSS = ("encoder_attn", "EncDecAttention")  # the names of a decoder's modules that attend to what the encoder gives
MADE_OF_ENCODED = ("k", "v", "k_proj", "v_proj")  # their layers that see it
RELATIVE_POSITIONS = 512  # of a model that was trained with so many, and has no bound: T5's papers
NOT_FOLLOWED = ("num_beams", "no_repeat_ngram_size", "min_length", "forced_eos_token_id")
CHECKED_ENCODED, CHECKED_OUTPUT = 13, 6  # tokens that `verify` runs

_current: ContextVar[EncoderStep | Encoding | None] = ContextVar("octavo_encoder_step", default=None)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function: [1, num_heads, num_tokens, head_dim] in, [1, num_tokens, num_heads, head_dim] out."""
    running, role = _current.get(), getattr(module, "octavo_role", None)
    if running is None or role is None or attention_mask is not None:
        raise BadModel("attention was called outside a step, by a module that is not known, or with a mask of its own")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if isinstance(running, Encoding):
        return running.attend(role, query, key, value, scale), None
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    return running.attend(role, queries, keys, values, scale).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, lambda *_, **__: None)


class EncoderDecoder(TransformersDecoder):
    """A Decoder around a Transformers model with an encoder. Its batches say what the encoder gave for their tokens."""

    batch_invariant = True  # products are those of the ops, and each token's attention is computed alone
    auto_model = AutoModelForSeq2SeqLM
    attention = IMPLEMENTATION

    def __init__(
        self,
        model: nn.Module,
        ops: Ops,
        device: torch.device,
        context_tokens: int | None = None,
        packing: LinearPacking | None = None,
    ) -> None:
        self._model = model
        self._ops = ops
        self._device = device
        self._options: dict[Any, AttentionOptions] = {}
        config = cast("Any", model).config
        self.name = f"transformers:{config.model_type}"
        self.vocab_size = int(config.vocab_size)
        self.window, self.state, self.hidden_size = 0, NO_STATE, 0
        self.encoder_support, self.context_tokens = self._find_support(config, context_tokens)
        self.num_layers, self.num_kv_heads, self.head_dim = self._find_attention()
        self._refused = torch.tensor(self._find_refused(), dtype=torch.int64, device=device)
        if packing is not None:
            self.packed = packing.pack(model, cast("Any", model).get_output_embeddings())
            self.name = f"{self.name} ({self.packed.describe()})"
        self._replace_modules()
        stacks = cast("Any", model).get_encoder(), cast("Any", model).get_decoder()
        self.stack_programs = programs_of_stacks([*map(with_biases, stacks)], ops, (_encodes, _decodes))
        self.encode: EncodeTokens | None = self._encode

    @classmethod
    def load_with_encoder(
        cls,
        directory: Path,
        dtype: torch.dtype,
        ops: Ops,
        device: torch.device,
        context_tokens: int | None,
        packing: LinearPacking | None,
    ) -> "EncoderDecoder":
        """Loads the model of `directory`, whose linear layers `packing` packs. Raises BadModel as `load` does.

        `context_tokens` is the length of the longest sequence that will be run, of models whose positions do not say.
        """
        more = {"context_tokens": context_tokens, "packing": packing}
        return cast("EncoderDecoder", cls.load(directory, dtype, ops, device, **more))

    # What the model is

    def _find_support(self, config: Any, context_tokens: int | None) -> tuple[EncoderSupport, int]:
        """How prompts are made, and how many tokens a sequence may have."""
        generation = cast("Any", self._model).generation_config
        first = generation.decoder_start_token_id
        first = getattr(config, "decoder_start_token_id", None) if first is None else first
        forced = generation.forced_bos_token_id
        start = tuple(token for token in (first, forced) if token is not None)
        if first is None or not all(type(token) is int and 0 <= token < self.vocab_size for token in start):
            raise BadModel(f"{self.name}: decoder_start_token_id {first!r}, forced_bos_token_id {forced!r}: no tokens")
        for name in NOT_FOLLOWED:
            if (value := getattr(generation, name, None)) not in (None, 0, 1):
                log.info("generation_config.json has %s %s, which requests do not get unless they ask", name, value)
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None:
            return EncoderSupport(start=start, max_encoded=positions, max_output=positions - len(start)), 2 * positions
        context = context_tokens or 2 * int(getattr(config, "n_positions", RELATIVE_POSITIONS))
        most = max(1, context - len(start) - 1)
        return EncoderSupport(start=start, max_encoded=most, max_output=most), context

    def _find_refused(self) -> list[int]:
        """The tokens that the model never generates, as its configuration says: the padding of Marian."""
        generation = cast("Any", self._model).generation_config
        words = [word for word in generation.bad_words_ids or [] if len(word) == 1]
        found = {*(word[0] for word in words), *(generation.suppress_tokens or [])}
        return sorted(token for token in found if 0 <= token < self.vocab_size)

    def _find_attention(self) -> tuple[int, int, int]:
        """Gives every module that attends its role. The number of decoder layers, of heads, and of their dimensions."""
        model = cast("Any", self._model)
        _give_roles(model.get_encoder())
        own, cross = _give_roles(model.get_decoder())
        sizes = {(_first(each, "n_heads", "num_heads"), _first(each, "key_value_proj_dim", "head_dim")) for each in own}
        head = model.get_output_embeddings()
        if len(own) != len(cross) or len(sizes) != 1:
            raise BadModel(f"{self.name}: {len(own)} layers with self attention, {len(cross)} with cross attention")
        if head is None or head.weight.shape[0] != self.vocab_size:
            raise BadModel(f"{self.name}: its output has another vocabulary than its input")
        return len(own), *next(iter(sizes))

    def _replace_modules(self) -> None:
        """Has layers compute what depends on each token alone, and the decoder's positions be those of the step."""
        model = cast("Any", self._model)
        head = model.get_output_embeddings()
        for name, each in model.named_modules():
            module: Any = each
            if type(module) in (nn.Linear, PackedLinear) and module is not head:
                parent, _, own = name.rpartition(".")
                of_encoded = parent.endswith(CROSS) and own in MADE_OF_ENCODED
                cast("Any", module).forward = functools.partial(self._linear, module, of_encoded)
            elif type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation"):
                module.forward = by_registers(module.forward)
        head.forward = functools.partial(self._head, head)
        positions = getattr(model.get_decoder(), "embed_positions", None)
        if positions is not None:
            positions.register_forward_pre_hook(_place, with_kwargs=True)

    def _linear(self, layer: nn.Linear | PackedLinear, of_encoded: bool, x: Tensor) -> Tensor:
        running = _current.get()
        if of_encoded and isinstance(running, EncoderStep) and not running.num_encoded:  # nobody sees what comes out
            return x.new_zeros((*x.shape[:-1], layer.out_features))
        if isinstance(layer, PackedLinear):
            return layer.multiply(x)
        return self._ops.linear(x, layer.weight, layer.bias)

    def _head(self, head: nn.Linear | PackedLinear, x: Tensor) -> Tensor:
        running = _current.get()
        wanted = x[:, running.wanted] if isinstance(running, EncoderStep) else x
        if isinstance(head, PackedLinear):
            return head.multiply(wanted.float())
        return self._ops.logits(wanted, head.weight, head.bias)

    # What it computes

    @torch.inference_mode()
    def _encode(self, token_ids: Sequence[int]) -> Tensor:
        """What the encoder gives for its tokens, [num_tokens, size]: the same bits whatever runs beside."""
        with running_as(Encoding()):
            ids = torch.tensor([[*token_ids]], device=self._device)
            states: Tensor = cast("Any", self._model).get_encoder()(input_ids=ids).last_hidden_state[0]
        return states

    def forward(self, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Tensor:
        step = EncoderStep(self._ops, batch, kv, rows, self._options, self.encoder_support.start[0])
        programs = self.stack_programs if self.stack_programs and self.stack_programs.use(kv) else None
        if programs:
            if step.num_encoded:
                programs.keep(step.states, step.encoded_slots)
            if not step.num_decoded:
                return torch.empty((0, self.vocab_size))
            programs.begin(*step.for_programs())
            step.has_programs = True
        with running_as(step):
            result = self._model(
                encoder_outputs=BaseModelOutput(last_hidden_state=step.states.unsqueeze(0)),
                decoder_input_ids=step.token_ids.unsqueeze(0),
                use_cache=False,
            )
        logits: Tensor = result.logits[0]
        self._refuse(logits, batch, rows)
        return logits

    def _refuse(self, logits: Tensor, batch: TokenBatch, rows: Tensor) -> None:
        """Keeps out what the model never generates, and what it does not after the tokens of these rows."""
        if len(self._refused):
            logits[:, self._refused] = -torch.inf

    def states(self, forwarded: Tensor, first: int) -> Tensor:
        raise RuntimeError(f"{self.name}: hidden states of an encoder-decoder are not read")

    @torch.inference_mode()
    def verify(self) -> None:
        """Runs a prompt and some output in pieces. BadModel if the model's own attention gives other logits."""
        encoded, states = self._encoded_to_check()
        num_encoded, num_tokens = len(encoded), len(encoded) + len(self.encoder_support.start) + CHECKED_OUTPUT
        output = [(i * 7919 + 13) % self.vocab_size for i in range(num_tokens - CHECKED_OUTPUT, num_tokens)]
        tokens = [*encoded, *self.encoder_support.start, *output]
        shape = KvShape(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            block_size=CHECK_BLOCK,
            head_dim=self.head_dim,
            dtype=next(self._model.parameters()).dtype,
        )
        table = list(range(-(-num_tokens // CHECK_BLOCK)))[::-1]
        kv = list(shape.allocate_arena(len(table), self._device).unbind(0))
        start, parts = 0, []
        for end in (5, num_tokens - 3, num_tokens - 1, num_tokens):
            places = range(start, end)
            slots = [table[p // CHECK_BLOCK] * CHECK_BLOCK + p % CHECK_BLOCK for p in places]
            batch = make_batch(tokens[start:end], places, slots, [end - start], [end], [table], self._device)
            batch.encoded = EncodedRows([num_encoded], states[start:end])
            rows = torch.arange(min(max(start, num_encoded), end) - start, end - start, device=self._device)
            parts.append(self.forward(batch, kv, rows))
            start = end
        found, expected = torch.cat(parts), self._own(encoded, tokens[num_encoded:])
        finite = found.isfinite()
        error = float((found - expected)[finite].abs().max() / expected[finite].abs().max())
        if not error <= CHECK_TOLERANCE:
            raise BadModel(
                f"{self.name}: through pages its logits differ by {error:.3g} of the largest; it cannot be served"
            )

    def _own(self, encoded: list[int], decoded: list[int]) -> Tensor:
        """The logits of the decoder's tokens, by an attention of Transformers that sums in float32, as pages do."""
        model = cast("Any", self._model)
        model.set_attn_implementation("sdpa")
        try:
            outputs = torch.tensor([decoded], device=self._device)
            result = model(**self._own_inputs(encoded), decoder_input_ids=outputs, use_cache=False)
            logits: Tensor = result.logits[0].float()
            return logits
        finally:
            model.set_attn_implementation(self.attention)

    def _encoded_to_check(self) -> tuple[list[int], Tensor]:
        """Tokens that the encoder reads, and what it gives for them."""
        encoded = [(i * 7919 + 13) % self.vocab_size for i in range(CHECKED_ENCODED)]
        return encoded, self._encode(encoded)

    def _own_inputs(self, encoded: list[int]) -> dict[str, Tensor]:
        """What the model's own encoder reads."""
        return {"input_ids": torch.tensor([encoded], device=self._device)}


@contextmanager
def running_as(what: EncoderStep | Encoding) -> Iterator[None]:
    token = _current.set(what)
    try:
        yield
    finally:
        _current.reset(token)


def _encodes() -> bool:
    return isinstance(_current.get(), Encoding)


def _decodes() -> bool:
    running = _current.get()
    return isinstance(running, EncoderStep) and running.has_programs


def _place(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a decoder's positions: within a step they are those of its tokens."""
    running = _current.get()
    return (given, named | {"position_ids": running.positions}) if isinstance(running, EncoderStep) else (given, named)


def _give_roles(stack: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules of an encoder or decoder that attend to its own tokens, and to those of the encoder, in order."""
    own: list[nn.Module] = []
    cross: list[nn.Module] = []
    bias: PositionBias | None = None  # of T5: of the first layer, or of each
    for name, module in stack.named_modules():
        if not any(isinstance(getattr(module, layer, None), nn.Linear) for layer in ("k", "k_proj")):
            continue
        is_cross = name.endswith(CROSS)
        if not is_cross and getattr(module, "has_relative_attention_bias", False):
            bias = _replace_bias(cast("Any", module))
        kind = cross if is_cross else own
        cast("Any", module).octavo_role = Role(len(kind), is_cross, None if is_cross else bias)
        kind.append(module)
    return own, cross


def _replace_bias(module: Any) -> PositionBias:
    """The biases of a module that makes them of distances. Within a step it makes none for the tokens beside each
    other, which may be those of several sequences."""
    compute = module.compute_bias

    def compute_none(*args: Any, **named: Any) -> Tensor:
        made: Tensor = compute(1, 1) if _current.get() is not None else compute(*args, **named)
        return made

    module.compute_bias = compute_none
    return PositionBias(compute)


def _first(module: nn.Module, *names: str) -> int:
    """The number under the first of these names that the module has."""
    return next(int(getattr(module, name)) for name in names if hasattr(module, name))
