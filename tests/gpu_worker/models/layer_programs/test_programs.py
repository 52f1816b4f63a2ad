"""Layers of hybrids as programs of the extension: beside their own code, in any pieces, on any pages."""

import pytest
import torch
from differences import difference
from effort import diagonal
from gguf_recurrent import MODELS
from instruction_sets import ISAS
from span_batches import batch_of_spans
from transformers_types import STATEFUL

from gpu_worker.models.layer_programs.programs import KINDS
from gpu_worker.models.through_transformers.attention import StepContext
from gpu_worker.ops import native
from octavo.cli.doctor.model_checks import PROGRAMMED

pytestmark = pytest.mark.skipif(native.load() is None, reason="the extension was not built")
TOKENS = [(7 * i + 3) % 128 for i in range(50)]
IN_PROGRAMS = (
    *("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5-even", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid"),
    *("granitemoehybrid-dense", "falcon_h1", "falcon_h1-scaled", "falcon_h1-normed", "bamba", "jamba", "mamba"),
    "mamba2",
)


@pytest.fixture
def made(tiny):
    """Tiny models by name."""
    return lambda name: tiny(name) if name in STATEFUL else tiny(f"recurrent {name}", *MODELS[name])


def states_of(runner, spans, tables, tokens=TOKENS):
    """The hidden states of tokens of sequences, (sequence, start, end) each."""
    _, batch = batch_of_spans([tokens] * (1 + max(each for each, _, _ in spans)), spans, tables, runner.info.block_size)
    count, decoder = sum(end - start for _, start, end in spans), runner._decoder
    with torch.inference_mode():
        return decoder.states(decoder.forward(batch, runner._arena.layers, torch.arange(count)), 0).clone()


@pytest.mark.parametrize(("name", "isa"), diagonal(IN_PROGRAMS, ISAS), indirect=["isa"])
def test_programs_have_the_logits_of_transformers(name, isa, made, load, all_logits, monkeypatch):
    model, runner = made(name), load(made(name).directory)
    programs, expected = runner._decoder.programs, model.logits(TOKENS)
    assert programs is not None
    for ends in ((), (5, 6, 7, 16, 17, 41)):
        assert difference(all_logits(runner, TOKENS, ends), expected) < 5e-4
    monkeypatch.setattr(programs, "begin", lambda batch, kv: False)
    assert difference(all_logits(runner, TOKENS), expected) < 5e-4, "by their own code on pages"


def test_every_kind_of_layer_is_tested(made):
    found = {type(layer).__name__ for name in IN_PROGRAMS for layer in made(name).model.base_model.layers}
    assert found == set(KINDS)
    assert {made(name).model.config.get_text_config().model_type for name in IN_PROGRAMS} <= {*PROGRAMMED}


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "granitemoehybrid-dense", "falcon_h1", "mamba"])
def test_states_have_equal_bits_in_any_pieces_and_company(name, made, load):
    """Pieces that are shorter than a convolution's kernel, that end with blocks and within them, and a fork."""
    runner, size = load(made(name).directory), 8
    table = list(range(7))[::-1]
    whole = states_of(runner, [(0, 0, 50)], [table])
    for ends in (range(1, 51), (8, 16, 20, 21, 23, 24, 25, 50)):
        found, start = [], 0
        for end in ends:
            found.append(states_of(runner, [(0, start, end)], [table]))
            start = end
        assert torch.equal(torch.cat(found), whole)
    others = [list(range(10 + 7 * i, 17 + 7 * i)) for i in range(3)]
    for spans in (
        [(0, 0, 20), (1, 0, 9), (2, 0, 33)],
        [(0, 20, 21), (1, 9, 10), (2, 33, 34)],
        [(0, 21, 50), (1, 10, 50)],
    ):
        found = states_of(runner, spans, others).split([end - start for _, start, end in spans])
        for part, (_, start, end) in zip(found, spans, strict=True):
            assert torch.equal(part, whole[start:end])
    forked = [*others[0][: 20 // size], 40, 41, 42, 43, 44]
    states_of(runner, [(0, 16, 24)], [forked])
    assert torch.equal(states_of(runner, [(0, 24, 40)], [forked]), whole[24:40])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_5_text", {"kv_cache_dtype": "int8"}),
        ("qwen3_5_text", {"kv_cache_dtype": "bfloat16"}),
        ("qwen3_5_text", {"block_size": 256}),
        ("mamba", {"kv_cache_dtype": "int8"}),  # its blocks have 1056 bytes in a layer, no multiple of 64
    ],
)
def test_a_state_may_lie_in_any_layers_of_the_arena(name, options, made, load, monkeypatch):
    """Matrices of heads that go on in another layer of it are copied, and have the same bits."""
    runner = load(made(name).directory, **options)
    table = list(range(7))
    found = [states_of(runner, [(0, start, end)], [table]) for start, end in ((0, 11), (11, 30), (30, 31))]
    monkeypatch.setattr(runner._decoder.programs, "begin", lambda batch, kv: False)
    own = [states_of(runner, [(0, start, end)], [table]) for start, end in ((0, 11), (11, 30), (30, 31))]
    assert difference(torch.cat(found), torch.cat(own)) < 0.02


def test_numerics_tell_programs_from_other_layers(made, load):
    runner, halves = load(made("lfm2").directory), load(made("lfm2").directory, dtype="bfloat16")
    assert "/programs-1/" in runner.info.numerics
    assert halves._decoder.programs is None and "programs" not in halves.info.numerics


def test_layers_with_windows_are_no_programs(made, load, monkeypatch):
    """As if a later Transformers told attention of one."""
    note = StepContext.note
    monkeypatch.setattr(StepContext, "note", lambda step, layer, keys, values, _: note(step, layer, keys, values, 64))
    assert load(made("lfm2").directory)._decoder.programs is None
    assert load(made("mamba").directory)._decoder.programs is not None, "it has no attention"


@pytest.mark.parametrize("name", ["granitemoehybrid", "mamba2"])
def test_a_configuration_may_have_a_number_without_end(name, made, load, all_logits, monkeypatch):
    """Steps of Mamba 2 may be of any length. Transformers writes that as no number of JSON, and reads it itself."""
    directory = made(name).directory
    assert '"__float__": "Infinity"' in (directory / "config.json").read_text()
    runner = load(directory, quantization="q8")
    found = all_logits(runner, TOKENS)
    monkeypatch.setattr(runner._decoder.programs, "begin", lambda batch, kv: False)
    assert difference(found, all_logits(runner, TOKENS)) < 5e-3
