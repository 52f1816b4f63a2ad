"""Models with a state beside keys and values: it goes on from the block of the token before, in pieces of any size."""

from dataclasses import replace

import pytest
import torch
from differences import difference
from effort import diagonal, some
from same_bits import FAULTS, Engines, draw_cases
from transformers_types import STATEFUL

from gpu_worker.models.through_transformers.recurrence import Recurrences, keeping
from gpu_worker.models.through_transformers.states import StepStates
from gpu_worker.ops import choose_ops, make_batch
from gpu_worker.ops.state_format import BlockStates, StatePart, StateShape
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
    torch.set_num_threads(1)
    engines = Engines([load(tiny(name).directory, swap_bytes=1 << 22) for _ in range(2)])
    drawn = draw_cases([(i * 37 + i // 96 * 11) % 128 for i in range(800)], 20, 3, (40, 60), (12, 20))
    cases = [replace(case, step_tokens=min(case.step_tokens, 64)) for case in drawn if case.fault == fault]
    assert len(cases) == 4
    for compared in engines.compare(cases):
        assert compared.num_tokens and not compared.wrong_tokens, compared.case


@pytest.mark.parametrize("name", ["lfm2", "jamba"])
def test_a_state_of_other_tokens_is_found_out(name, tiny, load, all_logits):
    runner = load(tiny(name).directory)
    all_logits(runner, TOKENS, (20,))
    states = BlockStates(runner._decoder.state, runner._arena.layers[runner._decoder.num_layers :])
    states.set_num_tokens(6, 7)
    batch = make_batch([1], [8], [5 * 8], [1], [9], [[6, 5]], CPU)
    with pytest.raises(RuntimeError, match="block 6 has the state after 7 tokens of a sequence, not 8"):
        runner._decoder.forward(batch, runner._arena.layers, torch.tensor([0]))


def test_layouts_tell_models_with_other_states_apart(tiny, load):
    runners = [load(tiny(name).directory) for name in ("lfm2", "lfm2_moe")]
    halves = load(tiny("lfm2").directory, dtype="bfloat16", kv_cache_dtype="float32")
    assert len({runner.info.layout for runner in (*runners, halves)}) == 2, "the first two have the same form"


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_blocks_may_be_large_and_of_any_type(kv_dtype, tiny, load, greedy):
    """A state has its own type, in blocks of whatever else."""
    model = tiny("qwen3_5_text")
    runner = load(model.directory, block_size=256, kv_cache_dtype=kv_dtype)
    whole, odd = greedy(runner, [TOKENS], 8), greedy(load(model.directory, kv_cache_dtype=kv_dtype), [TOKENS], 8)
    assert whole == odd
    with pytest.raises(InvalidArgument, match="256 slots are for models with recurrent layers: say 128 at most"):
        load(tiny("opt").directory, block_size=256)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def convolution(operations, part):
    return operations.convolve(draw(1, 1, 40, 20)[..., part], draw(2, 40, 4), draw(3, 40), "silu")[0].T


def delta_rule(operations, part):
    queries, keys, values = (
        draw(1, 1, 20, 2, 16)[:, part],
        draw(2, 1, 20, 2, 16)[:, part],
        draw(3, 1, 20, 4, 24)[:, part],
    )
    fading, rates = -draw(4, 1, 20, 4)[:, part].abs(), draw(5, 1, 20, 4)[:, part].abs()
    outputs, _ = operations.gated_delta(queries, keys, values, fading, rates, use_qk_l2norm_in_kernel=True)
    return outputs[0]


def kimi_delta(operations, part):
    queries, keys, values = (draw(seed, 1, 20, 4, 16)[:, part] for seed in (1, 2, 3))
    fading, rates = -draw(4, 1, 20, 4, 16)[:, part].abs(), draw(5, 1, 20, 4)[:, part].abs()
    return operations.gated_delta(queries, keys, values, fading, rates)[0][0]


def mamba2(operations, part):
    inputs, steps = draw(1, 1, 20, 6, 8)[:, part], draw(2, 1, 20, 6)[:, part]
    fading, keys, queries = -draw(3, 6).abs(), draw(4, 1, 20, 2, 16)[:, part], draw(5, 1, 20, 2, 16)[:, part]
    more = {"D": draw(6, 6), "dt_bias": draw(7, 6), "dt_softplus": True}
    return operations.mamba2(inputs, steps, fading, keys, queries, 8, **more)[0]


def mamba1(operations, part):
    inputs, steps, gates = (draw(seed, 1, 40, 20)[..., part] for seed in (1, 2, 6))
    fading, keys, queries = -draw(3, 40, 8).abs(), draw(4, 1, 8, 20)[..., part], draw(5, 1, 8, 20)[..., part]
    more = {"D": draw(7, 40), "z": gates, "delta_bias": draw(8, 40), "delta_softplus": True}
    return operations.mamba1(inputs, steps, fading, keys, queries, **more)[0].T


FORMS = {
    convolution: StatePart("inputs", (3, 40), torch.float32),
    delta_rule: StatePart("delta", (4, 16, 24), torch.float32),
    kimi_delta: StatePart("delta", (4, 16, 16), torch.float32),
    mamba2: StatePart("mamba2", (6, 16, 8), torch.float32),
    mamba1: StatePart("mamba1", (40, 8, 1), torch.float32),
}


@pytest.mark.parametrize("operation", FORMS)
def test_an_operation_has_the_same_bits_in_any_pieces(operation):
    ops, shape = choose_ops(CPU), StateShape((FORMS[operation],))

    def outputs(ends):
        layers, parts, start = list(torch.full((-(-shape.num_bytes // 512), 3, 512), 255, dtype=torch.uint8)), [], 0
        for end in ends:
            length = end - start
            batch = make_batch([0] * length, range(start, end), [0] * length, [length], [end], [[2, 0, 1]], CPU)
            operations = Recurrences(ops, StepStates(batch, BlockStates(shape, layers), 8))
            with keeping(operations):
                parts.append(operation(operations, slice(start, end)))
            start = end
        return torch.cat(parts), layers

    whole, kept = outputs([20])
    assert whole.isfinite().all()
    for ends in (range(1, 21), [8, 16, 20], [3, 4, 11, 12, 19, 20]):
        pieces, layers = outputs(ends)
        assert torch.equal(pieces, whole)
        for block in range(3):
            ours, theirs = (BlockStates(shape, each).read(0, block) for each in (layers, kept))
            assert torch.equal(ours, theirs)


def test_another_order_of_operations_is_refused():
    layers = list(torch.zeros((4, 1, 512), dtype=torch.uint8))
    batch = make_batch([0], [0], [0], [1], [1], [[0]], CPU)
    states = StepStates(batch, BlockStates(StateShape((FORMS[convolution],)), layers), 8)
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
        load(tiny("qwen3_next").directory)
