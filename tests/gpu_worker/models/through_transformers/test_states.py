"""Models with a state beside keys and values: it goes on from the block of the token before, in pieces of any size."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from differences import difference
from effort import diagonal, some
from safetensors import safe_open
from same_bits import FAULTS, Engines, draw_cases
from transformers_types import STATEFUL

from gpu_worker.models.through_transformers.recurrence import Recurrences, keeping
from gpu_worker.models.through_transformers.states import StepStates
from gpu_worker.ops import choose_ops, make_batch
from gpu_worker.ops.state_format import BlockStates, StatePart, StateShape
from octavo.cli.doctor.state_size import numbers_of_folder
from octavo.request.errors import BadModel, InvalidArgument

CPU = torch.device("cpu")
TOKENS = [(7 * i + 3) % 128 for i in range(50)]
ONE_OF_EACH_OPERATION = ("lfm2", "qwen3_next", "kimi_linear", "granitemoehybrid", "jamba")


@pytest.mark.parametrize("name", some(STATEFUL, ONE_OF_EACH_OPERATION))
def test_pieces_of_a_prompt_have_the_logits_of_transformers(name, tiny, load, all_logits):
    """Pieces that end within blocks and with them, and single tokens. Delta rules by chunks, as Transformers has them,
    err by 1.5e-4 on Qwen3-Next, where ours err by 1.2e-5 (against float64)."""
    model, runner = tiny(name), load(tiny(name).directory)
    expected = model.logits(TOKENS)
    for ends in ((), (5, 6, 7, 16, 17, 41)):
        logits = all_logits(runner, TOKENS, ends)
        assert difference(logits, expected) < 5e-4


@pytest.mark.parametrize(("fault", "name"), diagonal(FAULTS, ["lfm2", "jamba", "qwen3_next", "bamba"]))
def test_a_continued_sequence_says_the_same(name, fault, tiny, load):
    """Another worker computes it again, or it goes on there with its blocks, or after a swap or a prefix hit."""
    engines = Engines([load(tiny(name).directory, swap_bytes=1 << 22) for _ in range(2)])
    drawn = draw_cases([(i * 37 + i // 96 * 11) % 128 for i in range(800)], 20, 3, (40, 60), (12, 20))
    cases = [replace(case, step_tokens=min(case.step_tokens, 64)) for case in drawn if case.fault == fault]
    assert len(cases) == 4
    for compared in engines.compare(cases):
        assert compared.num_tokens and not compared.wrong_tokens, compared.case


@pytest.mark.parametrize("name", STATEFUL)
def test_the_doctor_knows_the_size_of_a_state(name, tiny, load):
    folder = tiny(name).directory
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 (it is no dict)
    config = json.loads((folder / "config.json").read_text())
    told = 4 * numbers_of_folder(shapes, config | (config.get("text_config") or {}))
    kept = load(folder)._decoder.state.num_bytes
    assert told <= kept < told + 128, "but for what fills up lines"


def test_a_state_of_other_tokens_is_found_out(tiny, load, all_logits):
    runner = load(tiny("lfm2").directory)
    all_logits(runner, TOKENS, (20,))
    states = BlockStates(runner._decoder.state, runner._arena.layers[runner._decoder.num_layers :])
    states.set_num_tokens(6, 7)
    batch = make_batch([1], [8], [5 * 8], [1], [9], [[6, 5]], CPU)
    with pytest.raises(RuntimeError, match="block 6 has the state after 7 tokens of a sequence, not 8"):
        runner._decoder.forward(batch, runner._arena.layers, torch.tensor([0]))
    same, halves = (
        load(tiny("lfm2_moe").directory),
        load(tiny("lfm2").directory, dtype="bfloat16", kv_cache_dtype="float32"),
    )
    assert same.info.layout == runner.info.layout != halves.info.layout, "other states have another layout"


def test_blocks_may_be_large_and_of_any_type(tiny, load, greedy):
    """A state has its own type, in blocks of whatever else."""
    large, small = (load(tiny("qwen3_5_text").directory, block_size=n, kv_cache_dtype="int8") for n in (256, 8))
    assert greedy(large, [TOKENS], 8) == greedy(small, [TOKENS], 8)
    with pytest.raises(InvalidArgument, match="256 slots are for models with recurrent layers: say 128 at most"):
        load(tiny("opt").directory, block_size=256)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def delta(operations, part, heads, fading, **more):
    """A rule of 20 tokens, with `heads` of queries and keys."""
    queries, keys, values = draw(1, 1, 20, heads, 16), draw(2, 1, 20, heads, 16), draw(3, 1, 20, 4, 24)
    given = (queries, keys, values, -draw(4, 1, 20, *fading).abs(), draw(5, 1, 20, 4).abs())
    return operations.gated_delta(*(each[:, part] for each in given), **more)[0][0]


def mamba2(operations, part):
    given = draw(1, 1, 20, 6, 8), draw(2, 1, 20, 6), draw(4, 1, 20, 2, 16), draw(5, 1, 20, 2, 16)
    inputs, steps, keys, queries = (each[:, part] for each in given)
    more = {"D": draw(6, 6), "dt_bias": draw(7, 6), "dt_softplus": True}
    return operations.mamba2(inputs, steps, -draw(3, 6).abs(), keys, queries, 8, **more)[0]


def mamba1(operations, part):
    given = *(draw(seed, 1, 40, 20) for seed in (1, 2, 6)), draw(4, 1, 8, 20), draw(5, 1, 8, 20)
    inputs, steps, gates, keys, queries = (each[..., part] for each in given)
    more = {"D": draw(7, 40), "z": gates, "delta_bias": draw(8, 40), "delta_softplus": True}
    return operations.mamba1(inputs, steps, -draw(3, 40, 8).abs(), keys, queries, **more)[0].T


OPERATIONS = {  # by name: the state's part, and the outputs of some tokens
    "convolution": (
        StatePart("inputs", (3, 40), torch.float32),
        lambda ops, part: ops.convolve(draw(1, 1, 40, 20)[..., part], draw(2, 40, 4), draw(3, 40), "silu")[0].T,
    ),
    "delta": (
        StatePart("delta", (4, 16, 24), torch.float32),
        lambda ops, part: delta(ops, part, 2, (4,), use_qk_l2norm_in_kernel=True),
    ),
    "kimi": (StatePart("delta", (4, 16, 24), torch.float32), lambda ops, part: delta(ops, part, 4, (4, 16))),
    "mamba2": (StatePart("mamba2", (6, 16, 8), torch.float32), mamba2),
    "mamba1": (StatePart("mamba1", (40, 8, 1), torch.float32), mamba1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_same_bits_in_any_pieces(name):
    kept, operation = OPERATIONS[name]
    ops, shape = choose_ops(CPU), StateShape((kept,))

    def outputs(ends):
        layers = list(torch.full((-(-shape.num_bytes // 512), 3, 512), 255, dtype=torch.uint8))
        parts, states = [], BlockStates(shape, layers)
        for start, end in pairwise((0, *ends)):
            length = end - start
            batch = make_batch([0] * length, range(start, end), [0] * length, [length], [end], [[2, 0, 1]], CPU)
            operations = Recurrences(ops, StepStates(batch, states, 8))
            with keeping(operations):
                parts.append(operation(operations, slice(start, end)))
        return [torch.cat(parts), *(states.read(0, block) for block in range(3))]

    whole = outputs([20])
    assert whole[0].isfinite().all()
    for ends in (range(1, 21), [8, 16, 20], [3, 4, 11, 12, 19, 20]):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs(ends), whole, strict=True))


def test_another_order_of_operations_is_refused():
    layers = list(torch.zeros((4, 1, 512), dtype=torch.uint8))
    batch = make_batch([0], [0], [0], [1], [1], [[0]], CPU)
    states = StepStates(batch, BlockStates(StateShape((OPERATIONS["convolution"][0],)), layers), 8)
    with pytest.raises(RuntimeError, match="where it kept something else when it was loaded"):
        states.claim("delta", (1, 1, 1), torch.float32)
    with pytest.raises(RuntimeError, match="kept 0 parts of a state, not 1"):
        states.end()


def test_a_recurrence_that_is_not_replaced_is_found_out(tiny, load, monkeypatch):
    """As if a later Transformers called it otherwise: the first piece's convolution is forgotten."""
    from gpu_worker.models.through_transformers import recurrence

    monkeypatch.setattr(StepStates, "before", lambda self, index, run: torch.zeros(self.asked[index].shape))
    assert recurrence.REPLACED
    with pytest.raises(BadModel, match="through pages its logits differ"):
        load(tiny("olmo_hybrid").directory)
