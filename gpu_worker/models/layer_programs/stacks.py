"""The layers of models with an encoder as programs: of the encoder, of the decoder, and of what the decoder keeps of
what the encoder gave."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from gpu_worker.models.layer_programs.recipe import LayerRecipe, Slice, UnknownLayer, vector
from gpu_worker.ops import Ops
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.ops.native_cpu import MAX_HEAD_DIM, NativeCpuOps

log = logging.getLogger(__name__)

# By the names of layers, without EncoderLayer or DecoderLayer: whether they norm what enters a part, not what leaves.
NORMS_FIRST = {
    **dict.fromkeys(("Bart", "BlenderbotSmall", "Marian", "PLBart"), False),
    **dict.fromkeys(("Blenderbot", "MBart", "Pegasus", "Whisper"), True),
}
T5 = ("T5Block", "MT5Block", "UMT5Block")
WITH_BIASES = ("T5Block", "MT5Block")  # which return those of positions beside the states
T5_NORMS = ("T5LayerNorm", "MT5LayerNorm", "UMT5LayerNorm")
ACTIVATIONS: Mapping[str, str] = {
    "ReLU": "relu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "SiLUActivation": "silu",
    "SiLU": "silu",
}
PROJECTIONS = (("q", "k", "v", "o"), ("q_proj", "k_proj", "v_proj", "out_proj"))
OWN, CROSS, MLP = "own", "cross", "mlp"
BLOCK = 16  # tokens of a block of the encoder's own pages


class EncoderProgram:
    """What each layer of an encoder does with the tokens of one sequence. Any thread may run it: one does at a time."""

    def __init__(self, ops: NativeCpuOps, layers: Sequence[nn.Module], hidden: int, biases: Sequence[Tensor | None]):
        """`biases`: of each layer, by how far a key is after its query; None: there are none."""
        self._lock = Lock()
        self._extension = ops.extension
        self._room = ops.extension.ProgramRoom()
        self._num_blocks = 0
        heads = {_heads(_parts(layer)[0][2]) for layer in layers}
        if len(heads) != 1:
            raise UnknownLayer(f"layers with {len(heads)} numbers of heads")
        self._heads = heads.pop()
        if self._heads[1] % 8 or self._heads[1] > MAX_HEAD_DIM:
            raise UnknownLayer(f"heads of {self._heads[1]} numbers, not a multiple of 8 up to {MAX_HEAD_DIM}")
        self._recipes = [LayerRecipe(ops.extension, hidden) for _ in layers]
        for recipe, layer, bias in zip(self._recipes, layers, biases, strict=True):
            # All layers have the same pages, one after another.
            _write_layer(recipe, layer, 0, self._heads[1], {"bias": bias, "both_ways": True})
        self._programs = [each.program() for each in self._recipes]

    def run(self, states: Tensor) -> None:
        """Changes states [num_tokens, hidden] of all tokens of a sequence."""
        count = len(states)
        with self._lock:
            self._make_room(-(-count // BLOCK))
            given = (
                torch.tensor([0, count], dtype=torch.int32),
                torch.tensor([count], dtype=torch.int32),
                torch.arange(self._num_blocks, dtype=torch.int32)[None],
                torch.arange(count),
            )
            self._room.begin(*given)
            for program in self._programs:  # a program of all layers would keep steps waiting that run beside it
                program.run(states, self._room)

    def _make_room(self, num_blocks: int) -> None:
        if num_blocks > self._num_blocks:
            num_heads, dim = self._heads
            shape = KvShape(num_layers=1, num_kv_heads=num_heads, block_size=BLOCK, head_dim=dim, dtype=torch.float32)
            self._pages = shape.allocate_arena(num_blocks, torch.device("cpu"))[0]
            self._room.use([self._pages], [], BLOCK)
            self._num_blocks = num_blocks


class DecoderPrograms:
    """What the layers of a decoder do with its tokens, and what they keep of those that the encoder has read.

    Only one thread may run steps at a time.
    """

    def __init__(
        self,
        ops: NativeCpuOps,
        layers: Sequence[nn.Module],
        hidden: int,
        encoded: int,
        biases: Sequence[Tensor | None],
    ):
        """`encoded`: numbers of what the encoder gives for a token."""
        self._ops = ops
        self._arena: Sequence[Tensor] | None = None
        self._room, self._kept_room = ops.extension.ProgramRoom(), ops.extension.ProgramRoom()
        recipe, kept = LayerRecipe(ops.extension, hidden), LayerRecipe(ops.extension, encoded)
        self._head_dim = _heads(_parts(layers[0])[0][2])[1]
        for place, (layer, bias) in enumerate(zip(layers, biases, strict=True)):
            _write_layer(recipe, layer, place, self._head_dim, {"bias": bias})
            _write_kept(kept, layer, place, self._head_dim)
        self._recipes = recipe, kept
        self._program, self._kept = recipe.program(), kept.program()

    def use(self, kv: Sequence[Tensor]) -> bool:
        """Whether programs run on pages like these, which they do from now on."""
        if not self._ops.batch_invariant(kv[0], self._head_dim):
            return False
        if kv is not self._arena:
            for room in (self._room, self._kept_room):
                room.use(list(kv), [], kv[0].shape[3])
            self._arena = kv
        return True

    def keep(self, states: Tensor, slots: Tensor) -> None:
        """Writes keys and values of cross attention, of what the encoder gave [num_tokens, size], into these slots."""
        count, size = len(states), self._kept_room_block()
        table = torch.zeros((1, -(-count // size)), dtype=torch.int32)  # nobody reads what it names
        ends, lengths = torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
        self._kept_room.begin(ends, lengths, table, slots)
        self._kept.run(states, self._kept_room)

    def begin(self, own: Mapping[str, Tensor], crossed: Mapping[str, Tensor]) -> None:
        """A step begins. `own` and `crossed` are what a room's `begin` takes."""
        self._batch = own, crossed
        self._room.begin(**own, **{f"crossed_{name}": each for name, each in crossed.items()})

    def run(self, states: Tensor) -> None:
        """Changes states [num_tokens, hidden] of the decoder's tokens of the step."""
        self._program.run(states, self._room)

    def _kept_room_block(self) -> int:
        return 1 if self._arena is None else int(self._arena[0].shape[3])


def programs_of_stacks(
    stacks: Sequence[tuple[Any, Sequence[Tensor | None]]], ops: Ops, running: tuple[Callable[[], bool], ...]
) -> DecoderPrograms | None:
    """Has the layers of an encoder and of a decoder run as programs, or None: they run by their own code.

    With each come its layers' biases. `running` say whether the encoder runs, and whether a step of the decoder does
    that has begun for programs: elsewhere layers run by their own code.
    """
    if not isinstance(ops, NativeCpuOps):
        return None
    layers = [[*(stack.block if hasattr(stack, "block") else stack.layers)] for stack, _ in stacks]
    (encoder, encoder_biases), (decoder, decoder_biases) = stacks
    width, encoded = int(decoder.config.d_model), int(encoder.config.d_model)
    try:
        encoding = EncoderProgram(ops, layers[0], encoded, encoder_biases)
        programs = DecoderPrograms(ops, layers[1], width, encoded, decoder_biases)
    except (UnknownLayer, AttributeError, ValueError) as error:
        log.info("%s: its layers run by their own code (%s)", type(decoder).__name__, error)
        return None
    for each, runs, run in zip(layers, running, (encoding.run, programs.run), strict=True):
        for index, layer in enumerate(each):
            layer.forward = partial(_run_layer, layer.forward, runs, None if index else run, _more_of(layer))
    return programs


def _more_of(layer: nn.Module) -> tuple[None, ...] | None:
    """What its forward returns beside the states; None: it returns these alone."""
    return (None, None) if type(layer).__name__ in WITH_BIASES else None


def _run_layer(
    own: Callable[..., Any],
    runs: Callable[[], bool],
    run: Callable[[Tensor], None] | None,
    more: tuple[None, ...] | None,
    hidden_states: Tensor,
    *given: Any,
    **named: Any,
) -> Any:
    """In the place of a layer's forward. `run` changes the states as all layers do; None: it has been called."""
    if not runs():
        return own(hidden_states, *given, **named)
    if run is not None:
        hidden_states = hidden_states.contiguous()
        run(hidden_states[0])
    return hidden_states if more is None else (hidden_states, *more)


def _parts(layer: Any) -> list[tuple[str, Any, Any]]:
    """What a layer does, one after another: of which kind, with which norm, and the module."""
    if type(layer).__name__ in T5:
        own, *cross, last = layer.layer
        found = [(OWN, own.layer_norm, own.SelfAttention)]
        found += [(CROSS, each.layer_norm, each.EncDecAttention) for each in cross]
        return [*found, (MLP, last.layer_norm, last.DenseReluDense)]
    found = [(OWN, layer.self_attn_layer_norm, layer.self_attn)]
    if hasattr(layer, "encoder_attn"):
        found.append((CROSS, layer.encoder_attn_layer_norm, layer.encoder_attn))
    return [*found, (MLP, layer.final_layer_norm, layer)]


def _norms_first(layer: nn.Module) -> bool:
    name = type(layer).__name__
    family = name.removesuffix("EncoderLayer").removesuffix("DecoderLayer")
    known = name in T5 or (family != name and family in NORMS_FIRST)
    if not known or {each.dtype for each in layer.parameters()} != {torch.float32}:
        raise UnknownLayer(f"{name} is none that programs run, or not in float32")
    return name in T5 or NORMS_FIRST[family]


def _write_layer(recipe: LayerRecipe, layer: Any, place: int, head_dim: int, how: Mapping[str, Any]) -> None:
    """`how`: further options of attention to the layer's own tokens."""
    first, states = _norms_first(layer), recipe.states
    for kind, norm, module in _parts(layer):
        with recipe.space():
            entering = states
            if first:
                entering = recipe.take_numbers(states[3])
                _write_norm(recipe, norm, states, entering)
            if kind == MLP:
                _write_mlp(recipe, module, entering)
            else:
                _write_attention(recipe, module, kind, entering, place, head_dim, how)
        if not first:
            _write_norm(recipe, norm, states, states)


def _write_attention(
    recipe: LayerRecipe,
    module: Any,
    kind: str,
    entering: Slice,
    place: int,
    head_dim: int,
    how: Mapping[str, Any],
) -> None:
    query, key, value, out = _projections(module)
    queries = recipe.linear(query, entering)
    if kind == CROSS:
        read = recipe.take_numbers(queries[3])
        recipe.do("attend_crossed", read, queries, place, head_dim, float(module.scaling))
    else:
        keys, values = recipe.linear(key, entering), recipe.linear(value, entering)
        read = recipe.take_numbers(queries[3])
        recipe.do("attend", read, queries, keys, values, place, head_dim, 0, float(module.scaling), **how)
    recipe.add_linear(out, read, 1)


def _write_kept(recipe: LayerRecipe, layer: Any, place: int, head_dim: int) -> None:
    for kind, _, module in _parts(layer):
        if kind == CROSS:
            _, key, value, _ = _projections(module)
            with recipe.space():
                keys, values = recipe.linear(key, recipe.states), recipe.linear(value, recipe.states)
                recipe.do("keep", keys, values, place, head_dim)


def _write_mlp(recipe: LayerRecipe, mlp: Any, entering: Slice) -> None:
    if hasattr(mlp, "wi_0"):
        gate, up = recipe.linear(mlp.wi_0, entering), recipe.linear(mlp.wi_1, entering)
        recipe.do("activate", gate, _activation(mlp.act))
        recipe.do("multiply", gate, up)
        recipe.add_linear(mlp.wo, gate, 1)
        return
    first, last, activation = (
        (mlp.fc1, mlp.fc2, mlp.activation_fn) if hasattr(mlp, "fc1") else (mlp.wi, mlp.wo, mlp.act)
    )
    inner = recipe.linear(first, entering)
    recipe.do("activate", inner, _activation(activation))
    recipe.add_linear(last, inner, 1)


def _write_norm(recipe: LayerRecipe, norm: Any, inputs: Slice, to: Slice) -> None:
    if type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is not None:
        recipe.do("layer_norm", to, inputs, vector(norm.weight), vector(norm.bias), float(norm.eps))
    elif type(norm).__name__ in T5_NORMS:
        recipe.do("norm", to, inputs, vector(norm.weight), float(norm.variance_epsilon), inputs[3])
    else:
        raise UnknownLayer(f"a norm in a {type(norm).__name__}")


def _projections(module: Any) -> Iterable[nn.Module]:
    """Of queries, keys, values and outputs."""
    names = next(names for names in PROJECTIONS if hasattr(module, names[0]))
    return [getattr(module, name) for name in names]


def _heads(module: Any) -> tuple[int, int]:
    """How many, and of how many dimensions."""
    if hasattr(module, "n_heads"):
        return int(module.n_heads), int(module.key_value_proj_dim)
    return int(module.num_heads), int(module.head_dim)


def _activation(module: nn.Module) -> str:
    name = type(module).__name__
    if name not in ACTIVATIONS:
        raise UnknownLayer(f"the activation {name}")
    return ACTIVATIONS[name]
