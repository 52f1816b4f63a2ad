"""What the parts of a hybrid's layers do, as operations: attention, convolutions, recurrences, MLPs."""

from typing import Any

import torch
from torch import Tensor, nn

from gpu_worker.models.layer_programs.recipe import LayerRecipe, Slice, StateParts, UnknownLayer, parts, vector

L2_EPS = 1e-6  # of queries and keys of delta rules, in Transformers' code
CENTERED = ("Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3NextRMSNorm")  # whose weights lack one


def write_norm(recipe: LayerRecipe, norm: Any, inputs: Slice, to: Slice) -> None:
    """Of each `weight` numbers."""
    kind = type(norm).__name__
    if not kind.endswith("RMSNorm"):
        raise UnknownLayer(f"a norm in a {kind}")
    weight = vector(norm.weight) + (1 if kind in CENTERED else 0)
    recipe.do("norm", to, inputs, weight, _eps(norm), len(weight))


def write_short_convolution(recipe: LayerRecipe, mixer: Any, inputs: Slice, kept: StateParts, times: float) -> None:
    """LFM2's: inputs with one gate are convolved, with another one they leave."""
    projected = recipe.linear(mixer.in_proj, inputs)
    entering, leaving, values = parts(projected, *[projected[3] // 3] * 3)
    recipe.do("multiply", entering, values)
    convolved = _convolve(recipe, mixer.conv, entering, False, kept)
    recipe.do("multiply", convolved, leaving)
    recipe.add_linear(mixer.out_proj, convolved, times)


def write_delta(recipe: LayerRecipe, mixer: Any, inputs: Slice, kept: StateParts, times: float) -> None:
    """A gated delta net of Qwen3.5 or Qwen3-Next."""
    heads, key_heads, key_dim, value_dim = (
        getattr(mixer, name) for name in ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim")
    )
    if hasattr(mixer, "in_proj_qkvz"):
        mixed, gates, betas, fades = _ordered(recipe, mixer, inputs)
    else:
        mixed = recipe.linear(mixer.in_proj_qkv, inputs)
        gates, betas, fades = (
            recipe.linear(layer, inputs) for layer in (mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
        )
    _expect_silu(mixer.activation)
    mixed = _convolve(recipe, mixer.conv1d, mixed, True, kept)
    queries, keys, values = parts(mixed, key_heads * key_dim, key_heads * key_dim, heads * value_dim)
    read, rates = recipe.take_numbers(heads * value_dim), -mixer.A_log.detach().float().exp()
    place, sizes = kept.place("delta", heads, key_dim, value_dim), (heads, key_heads, key_dim, value_dim)
    given = (rates, vector(mixer.dt_bias), L2_EPS, sizes, place)
    recipe.do("delta", read, queries, keys, values, fades, betas, *given)
    recipe.do("norm", read, read, vector(mixer.norm.weight), _eps(mixer.norm), value_dim, gates)
    recipe.add_linear(mixer.out_proj, read, times)


def _ordered(recipe: LayerRecipe, mixer: Any, inputs: Slice) -> tuple[Slice, Slice, Slice, Slice]:
    """What Qwen3-Next projects by heads of keys: queries, keys and values; gates; betas; fades."""
    wide, narrow = recipe.linear(mixer.in_proj_qkvz, inputs), recipe.linear(mixer.in_proj_ba, inputs)
    numbers = (torch.arange(each[3])[None, None] for each in (wide, narrow))
    found = [order.flatten() for order in mixer.fix_query_key_value_ordering(*numbers)]

    def taken(source: Slice, *orders: Tensor) -> Slice:
        order = torch.cat(orders)
        to = recipe.take_numbers(len(order))
        recipe.do("take", to, source, order)
        return to

    return taken(wide, *found[:3]), taken(wide, found[3]), taken(narrow, found[4]), taken(narrow, found[5])


def write_mamba2(recipe: LayerRecipe, mixer: Any, inputs: Slice, kept: StateParts, times: float) -> None:
    """Of Granite 4, Bamba, Nemotron-H, Falcon-H1."""
    heads, groups, state = mixer.num_heads, mixer.n_groups, mixer.ssm_state_size
    inner, value_dim = heads * mixer.head_dim, mixer.head_dim
    projected = recipe.linear(mixer.in_proj, inputs)
    multipliers = getattr(mixer, "mup_vector", torch.ones(1)) * getattr(mixer, "ssm_in_multiplier", 1)
    if not torch.equal(multipliers, torch.ones_like(multipliers)):
        if mixer.in_proj.bias is not None:
            raise UnknownLayer("a multiplier beside a bias")
        recipe.do("scale", projected, vector(multipliers.flatten()))
    gates, mixed, fades = parts(projected, inner, inner + 2 * groups * state, heads)
    _expect_silu(mixer.activation)
    mixed = _convolve(recipe, mixer.conv1d, mixed, True, kept)
    values, keys, queries = parts(mixed, inner, groups * state, groups * state)
    read, space = recipe.take_numbers(inner), recipe.take_numbers(inner)
    place, sizes = kept.place("mamba2", heads, state, value_dim), (heads, groups, state, value_dim)
    given = (-mixer.A_log.detach().float().exp(), vector(mixer.dt_bias), vector(mixer.D), *mixer.time_step_limit)
    recipe.do("mamba2", read, queries, keys, values, fades, space, *given, sizes, place)
    if isinstance(mixer.norm, nn.Identity):
        recipe.do("silu_mul", read, gates, read)
    else:
        size = getattr(mixer.norm, "group_size", inner // groups)
        late = getattr(mixer.norm, "norm_before_gate", False)
        recipe.do("norm", read, read, vector(mixer.norm.weight), _eps(mixer.norm), size, gates, not late)
    recipe.add_linear(mixer.out_proj, read, times)


def write_mamba1(recipe: LayerRecipe, mixer: Any, inputs: Slice, kept: StateParts, times: float) -> None:
    """Of Jamba, which norms what decides on steps and reads, and of Mamba 1."""
    inner, state, rank = mixer.intermediate_size, mixer.ssm_state_size, mixer.time_step_rank
    mixed, gates = parts(recipe.linear(mixer.in_proj, inputs), inner, inner)
    _expect_silu(mixer.activation)
    values = _convolve(recipe, mixer.conv1d, mixed, True, kept)
    narrow, keys, queries = parts(recipe.linear(mixer.x_proj, values), rank, state, state)
    for name, normed in (("dt_layernorm", narrow), ("b_layernorm", keys), ("c_layernorm", queries)):
        if hasattr(mixer, name):
            write_norm(recipe, getattr(mixer, name), normed, normed)
    steps = recipe.linear(mixer.dt_proj, narrow, biased=False)
    read, rates = recipe.take_numbers(inner), -mixer.A_log.detach().float().exp()
    given = (rates, vector(mixer.dt_proj.bias), vector(mixer.D), kept.place("mamba1", inner, state, 1))
    recipe.do("mamba1", read, queries, keys, values, steps, *given)
    recipe.do("silu_mul", read, gates, read)
    recipe.add_linear(mixer.out_proj, read, times)


def write_attention(
    recipe: LayerRecipe, mixer: Any, inputs: Slice, layer: int, rotated: int, heads: tuple[int, int], times: float
) -> None:
    """`heads` are those of keys, and their dimensions. Queries may come with gates of what they read."""
    num_kv_heads, dim = heads
    queries, keys, values = (recipe.linear(getattr(mixer, name), inputs) for name in ("q_proj", "k_proj", "v_proj"))
    out = mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj
    width, gates = out.in_features, None
    if queries[3] == 2 * width:
        order = torch.arange(2 * width).view(-1, 2, dim)
        projected, queries, gates = queries, recipe.take_numbers(width), recipe.take_numbers(width)
        recipe.do("take", queries, projected, order[:, 0].flatten().contiguous())
        recipe.do("take", gates, projected, order[:, 1].flatten().contiguous())
    if queries[3] != width or keys[3] != num_kv_heads * dim or values[3] != keys[3]:
        raise UnknownLayer(f"heads of queries in a {type(mixer).__name__}")
    for norms, slices in ((("q_norm", "q_layernorm"), queries), (("k_norm", "k_layernorm"), keys)):
        for norm in (getattr(mixer, name) for name in norms if hasattr(mixer, name)):
            write_norm(recipe, norm, slices, slices)
    if (multiplier := getattr(mixer, "key_multiplier", 1)) != 1:
        recipe.do("scale", keys, torch.tensor([multiplier]))
    read = recipe.take_numbers(width)
    recipe.do("attend", read, queries, keys, values, layer, dim, rotated, float(mixer.scaling))
    if gates is not None:
        recipe.do("sigmoid_mul", read, gates, read)
    recipe.add_linear(out, read, times)


def write_mlp(recipe: LayerRecipe, mlp: Any, inputs: Slice, times: float) -> None:
    if hasattr(mlp, "input_linear"):
        both = recipe.linear(mlp.input_linear, inputs)
        gate, up = parts(both, both[3] // 2, both[3] // 2)
        down, activation = mlp.output_linear, mlp.activation
    elif hasattr(mlp, "w1"):
        gate, up, down, activation = recipe.linear(mlp.w1, inputs), recipe.linear(mlp.w3, inputs), mlp.w2, "silu"
    else:
        gate, up = recipe.linear(mlp.gate_proj, inputs), recipe.linear(mlp.up_proj, inputs)
        down, activation = mlp.down_proj, mlp.act_fn
    _expect_silu(activation)
    if (multiplier := getattr(mlp, "gate_multiplier", 1)) != 1:
        recipe.do("scale", gate, torch.tensor([multiplier]))
    recipe.do("silu_mul", gate, gate, up)
    recipe.add_linear(down, gate, times * getattr(mlp, "down_multiplier", 1))


def _convolve(recipe: LayerRecipe, layer: Any, inputs: Slice, silu: bool, kept: StateParts) -> Slice:
    taps, to = vector(layer.weight.squeeze(1).T), recipe.take_numbers(inputs[3])
    bias = None if layer.bias is None else vector(layer.bias)
    recipe.do("convolve", to, inputs, taps, bias, silu, kept.place("inputs", len(taps) - 1, inputs[3]))
    return to


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _expect_silu(activation: Any) -> None:
    name = activation if isinstance(activation, str) else type(activation).__name__
    if name not in ("silu", "swish", "SiLU", "SiLUActivation"):
        raise UnknownLayer(f"the activation {name}")
