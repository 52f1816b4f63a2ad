"""Models with an encoder: the tokens and logits of Transformers, and equal bits alone, beside others and in pieces."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from effort import diagonal, some
from encoded_types import ENCODED_TYPES, TinyEncoded
from same_bits import FAULTS, Engine, Engines, draw_cases
from span_batches import batch_of_spans

from gpu_worker.ops import native
from gpu_worker.ops.batch import EncodedRows
from gpu_worker.running.model_runner import ModelRunner
from octavo.request.errors import BadModel, InvalidArgument
from octavo.request.sampling import SamplingParams

NAMES = list(ENCODED_TYPES)
ONE_OF_EACH_ATTENTION = ("bart", "t5", "t5-gated", "umt5")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
same_bits = pytest.mark.skipif(native.load() is None, reason="the reference ops round by the batch's shape")


@pytest.fixture(scope="session")
def encoded(tmp_path_factory) -> Callable[[str], TinyEncoded]:
    made: dict[str, TinyEncoded] = {}
    directory = tmp_path_factory.mktemp("encoded")

    def make(name: str) -> TinyEncoded:
        if name not in made:
            made[name] = TinyEncoded(name, directory)
        return made[name]

    return make


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(length)]


def run(runner: ModelRunner, sequences: list[tuple[list[int], list[int]]], steps: list[list[tuple[int, int, int]]]):
    """Runs steps of spans (sequence, first token, end) of sequences (encoded, decoded). The logits of the decoder's
    tokens, by sequence and by their place in `decoded`."""
    size, decoder = runner.info.block_size, runner._decoder
    whole = [encoded + decoded for encoded, decoded in sequences]
    order = torch.randperm(runner.info.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    width = -(-max(map(len, whole)) // size)
    tables = [order[i * width : (i + 1) * width] for i in range(len(whole))]
    found: list[dict[int, torch.Tensor]] = [{} for _ in whole]
    for spans in steps:
        places, batch = batch_of_spans(whole, spans, tables, size)
        lengths = [len(sequences[i][0]) for i, _, _ in spans]
        states = [decoder.encode(sequences[i][0])[first:end] for i, first, end in spans]
        batch.encoded = EncodedRows(lengths, torch.cat(states))
        rows = [row for row, (i, p) in enumerate(places) if p >= len(sequences[i][0])]
        with torch.inference_mode():
            logits = decoder.logits(decoder.forward(batch, runner._arena.layers, torch.tensor(rows, dtype=torch.int64)))
        for row, values in zip(rows, logits, strict=False):
            i, p = places[row]
            found[i][p - len(sequences[i][0])] = values.clone()
    return [torch.stack([each[p] for p in range(len(each))]) for each in found]


@pytest.mark.parametrize("name", some(NAMES, ONE_OF_EACH_ATTENTION))
def test_a_prompt_and_its_output_have_the_logits_of_transformers(name, encoded, load):
    model, runner = encoded(name), load(encoded(name).directory)
    for length, count in ((1, 3), (8, 9), (37, 40)):
        read, decoded = text(length), [*model.start, *text(count, 1)]
        expected = model.logits(read, decoded).clone()
        expected[:, runner._decoder._refused] = -torch.inf
        end = length + len(decoded)
        for steps in ([[(0, 0, end)]], [[(0, p, min(p + 5, end))] for p in range(0, end, 5)]):
            [found] = run(runner, [(read, decoded)], steps)
            finite = expected.isfinite()
            assert torch.equal(found.isfinite(), finite)
            assert float((found - expected)[finite].abs().max() / expected[finite].abs().max()) < 2e-4


def engine_of(runner: ModelRunner, **config) -> Engine:
    return Engine(runner=runner, **{"max_batch_tokens": 64, "max_batch_sequences": 16, **config})


def outputs_of(engine: Engine, prompts: dict[str, list[int]], params=GREEDY) -> dict[str, list[int]]:
    encoder = engine.runner.info.encoder
    for name, read in prompts.items():
        engine.admit(name, encoder.prompt_of(read, "prompt"), params)
    engine.finish(10_000)
    return {name: engine.tokens[f"{name}.0"] for name in prompts}


@pytest.mark.parametrize("name", some(NAMES, ONE_OF_EACH_ATTENTION))
def test_sequences_of_different_lengths_get_the_tokens_of_generate(name, encoded, load):
    """Together, in steps of 16 tokens, so that prompts are cut while others decode."""
    model, runner = encoded(name), load(encoded(name).directory)
    prompts = {f"p{length}": text(length, length) for length in (1, 7, 8, 30, 61)}
    found = outputs_of(engine_of(runner, max_batch_tokens=16), prompts)
    assert found == {key: model.generate(read, 20) for key, read in prompts.items()}
    assert runner.info.eos_token_ids == (model.model.generation_config.eos_token_id,)


@same_bits
@pytest.mark.parametrize(("options", "name"), diagonal([{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], NAMES))
def test_bits_are_those_of_decodes_alone_whatever_runs_beside(name, options, encoded, load):
    model, runner = encoded(name), load(encoded(name).directory, **options)
    assert runner.info.piece_invariant
    rng = random.Random(len(name))
    sequences = [
        (text(length, length), [*model.start, *text(count, 3)]) for length, count in ((29, 41), (9, 5), (60, 17))
    ]
    read, decoded = sequences[0]
    end, first = len(read) + len(decoded), len(read) + len(model.start)
    alone = run(runner, sequences[:1], [[(0, 0, first)], *([(0, p, p + 1)] for p in range(first, end))])[0]
    assert alone.isfinite().any()
    pieces, start = [], 0
    while start < end:
        piece = min(end, start + rng.choice([1, 2, 3, 7, 16]))
        pieces.append([(0, start, piece)])
        start = piece
    lengths = [len(read) + len(decoded) for read, decoded in sequences]
    together = [[(1, 0, lengths[1] - 2), (0, 0, 35), (2, 0, 61)], [(0, 35, 36), (1, lengths[1] - 2, lengths[1] - 1)]]
    together += [[(2, 61, lengths[2]), (0, 36, end)]]
    for steps in ([[(0, 0, end)]], pieces, together):
        found = run(runner, sequences, steps)[0] if steps is together else run(runner, sequences[:1], steps)[0]
        assert torch.equal(found.view(torch.int32), alone.view(torch.int32))


@same_bits
@pytest.mark.parametrize(("fault", "name"), diagonal(FAULTS, ["bart", "t5", "t5-gated", "marian"]))
def test_a_continued_sequence_says_the_same(name, fault, encoded, load):
    """Another worker computes it again, or it goes on there with its blocks, or after a swap or a prefix hit."""
    runners = [load(encoded(name).directory, swap_bytes=1 << 22) for _ in range(2)]
    encoder = runners[0].info.encoder
    drawn = draw_cases(text(800), 20, 3, (40, 80), (12, 30))
    cases = [
        replace(case, prompt=tuple(encoder.prompt_of(case.prompt, "prompt")), step_tokens=min(case.step_tokens, 64))
        for case in drawn
        if case.fault == fault
    ]
    assert len(cases) == 4
    for compared in Engines(runners).compare(cases):
        assert compared.num_tokens and not compared.wrong_tokens and not compared.wrong_scores, compared.case


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_blocks_are_found_again_by_equal_prompts_alone(name, encoded, load):
    """The encoder changes what it gives for a token by what comes after it."""
    model, runner = encoded(name), load(encoded(name).directory)
    engine, read = engine_of(runner), text(43)
    other = [*read[:-1], read[-1] + 1]
    assert outputs_of(engine, {"first": read})["first"] == model.generate(read, 20)
    encoder = runner.info.encoder
    for key, tokens, cached in (("again", read, 40), ("other", other, 0), ("shorter", read[:32], 0)):
        sequence = engine.new(key, encoder.prompt_of(tokens, "prompt"), GREEDY)
        assert engine.scheduler.admit(sequence).admitted
        engine.finish(10_000)
        assert sequence.cached_tokens == cached
        assert engine.tokens[f"{key}.0"] == model.generate(tokens, 20)


@pytest.mark.parametrize("name", ["bart", "t5-gated"])
def test_branches_beams_and_penalties(name, encoded, load):
    model, runner = encoded(name), load(encoded(name).directory)
    read, encoder = text(21), runner.info.encoder
    engine = engine_of(runner)
    several = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=12, ignore_eos=True)
    engine.admit("several", encoder.prompt_of(read, "prompt"), several)
    engine.finish(10_000)
    drawn = [engine.tokens[f"several.{branch}"] for branch in range(3)]
    assert len(set(map(tuple, drawn))) == 3
    for speculation in ("off", "lookup"):
        again = engine_of(runner, speculation=speculation, prefix_caching=False)
        again.admit("several", encoder.prompt_of(read, "prompt"), several)
        again.finish(10_000)
        assert [again.tokens[f"several.{branch}"] for branch in range(3)] == drawn
    beams = SamplingParams(beam_width=3, n=1, max_tokens=6, ignore_eos=True)
    engine.admit("beams", encoder.prompt_of(read, "prompt"), beams)
    engine.finish(10_000)
    best = engine.tokens["beams.0"]
    assert best == model.generate(read, 6, num_beams=3, early_stopping=True, length_penalty=1.0)
    penalized = replace(GREEDY, repetition_penalty=1.7)
    found = outputs_of(engine, {"penalized": read}, penalized)["penalized"]
    assert found == model.generate(read, 20, repetition_penalty=1.7) != outputs_of(engine, {"plain": read})["plain"]


def test_the_encoder_runs_once_for_a_prompt_in_pieces(encoded, load):
    model, runner = encoded("t5"), load(encoded("t5").directory)
    bank, calls = runner._encodings, []
    encode = bank._encode
    bank._encode = lambda tokens: calls.append(len(tokens)) or encode(tokens)
    read = text(70)
    assert outputs_of(engine_of(runner, max_batch_tokens=16), {"a": read})["a"] == model.generate(read, 20)
    assert calls == [70]


def test_what_is_not_served_is_refused_by_name(encoded, load, tmp_path, monkeypatch):
    model = encoded("bart")
    with pytest.raises(InvalidArgument, match=r"^quantization: q8"):
        load(model.directory, quantization="q8")
    for attribute, value, what in (
        ("decoder_start_token_id", 264, "decoder_start_token_id 264"),
        ("forced_bos_token_id", -1, "forced_bos_token_id -1"),
    ):
        folder = tmp_path / attribute
        monkeypatch.setattr(model.model.generation_config, attribute, value)
        model.model.save_pretrained(folder)
        monkeypatch.undo()
        with pytest.raises(BadModel, match=what):
            load(folder)


def test_a_model_that_computes_otherwise_is_found_out(encoded, load, monkeypatch):
    """As if a later Transformers called attention in another way."""
    from gpu_worker.models.through_transformers import encoder_decoder

    monkeypatch.setattr(encoder_decoder, "_place", lambda module, given, named: (given, named))
    with pytest.raises(BadModel, match="through pages its logits differ"):
        load(encoded("bart").directory)
