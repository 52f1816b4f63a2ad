"""Models with an encoder: the tokens of Transformers, and equal bits alone, beside others and in pieces."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace

import gguf
import pytest
import torch
from effort import diagonal, some
from encoded_types import ENCODED_TYPES, TinyEncoded, check_branches_and_beams, engine_of
from gguf.quants import dequantize, quantize
from same_bits import FAULTS, Engine, Engines, draw_cases

from gpu_worker.models.packed import packed_cache
from gpu_worker.ops import native
from octavo.request.errors import BadModel, InvalidArgument
from octavo.request.sampling import SamplingParams

NAMES = list(ENCODED_TYPES)
ONE_OF_EACH_ATTENTION = ("bart", "t5", "t5-gated", "umt5", "marian")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
OPTIONS = ({}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"})
FORMS = [*zip(FAULTS, [*OPTIONS, *OPTIONS], strict=False), ("kill", {"quantization": "q8"})]
FORMS += [("odd pieces", {"quantization": "q4-a8", "dtype": "bfloat16"}), ("kill", {"quantization": "q8-a8"})]
extended = pytest.mark.skipif(native.load() is None, reason="the reference ops round by the batch's shape")


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


def outputs_of(engine: Engine, prompts: dict[str, list[int]], params=GREEDY) -> dict[str, list[int]]:
    encoder = engine.runner.info.encoder
    for name, read in prompts.items():
        engine.admit(name, encoder.prompt_of(read, "prompt"), params)
    engine.finish(10_000)
    return {name: engine.tokens[f"{name}.0"] for name in prompts}


@pytest.mark.parametrize("name", some(NAMES, ONE_OF_EACH_ATTENTION))
def test_sequences_of_different_lengths_get_the_tokens_of_generate(name, encoded, load):
    """Together, in steps of 16 tokens, so that prompts are cut while others decode: each is encoded once."""
    model, runner = encoded(name), load(encoded(name).directory)
    bank, encoded_lengths = runner._encodings, []
    encode = bank._encode
    bank._encode = lambda tokens: encoded_lengths.append(len(tokens)) or encode(tokens)
    prompts = {f"p{length}": text(length, length) for length in (1, 7, 8, 30, 61)}
    found = outputs_of(engine_of(runner, max_batch_tokens=16), prompts)
    assert found == {key: model.generate(read, 20) for key, read in prompts.items()}
    assert sorted(encoded_lengths) == [1, 7, 8, 30, 61]
    assert runner.info.eos_token_ids == (model.model.generation_config.eos_token_id,)


@pytest.mark.parametrize("sizes", [{"name": "bart", "encoder_attention_heads": 8}, {"name": "t5", "d_kv": 12}])
def test_heads_that_programs_do_not_take_run_by_their_own_code(sizes, load, tmp_path):
    """Of 4 and of 12 numbers."""
    model = TinyEncoded(**sizes, directory=tmp_path)
    runner, read = load(model.directory), text(30)
    assert runner._decoder.stack_programs is None
    assert outputs_of(engine_of(runner), {"p": read}) == {"p": model.generate(read, 20)}


@extended
@pytest.mark.parametrize("name", some(NAMES, ONE_OF_EACH_ATTENTION))
def test_layers_run_as_programs_and_by_their_own_code(name, encoded, load, monkeypatch):
    """Those of the encoder as well. Numbers of another type are none that programs take."""
    model, runner = encoded(name), load(encoded(name).directory)
    programs, prompts = runner._decoder.stack_programs, {f"p{length}": text(length, length) for length in (1, 30, 61)}
    expected, ran = {key: model.generate(read, 20) for key, read in prompts.items()}, []
    begin = programs.begin
    monkeypatch.setattr(programs, "begin", lambda *batches: ran.append(batches) or begin(*batches))
    assert outputs_of(engine_of(runner), prompts) == expected
    assert ran
    monkeypatch.setattr(programs, "use", lambda kv: False)
    assert outputs_of(engine_of(runner), {f"own {key}": read for key, read in prompts.items()}) == {
        f"own {key}": tokens for key, tokens in expected.items()
    }
    assert load(model.directory, dtype="bfloat16")._decoder.stack_programs is None


@extended
@pytest.mark.parametrize(("form", "name"), diagonal(FORMS, NAMES))
def test_a_continued_sequence_has_the_same_bits(name, form, encoded, load):
    """Another worker computes it again, or it goes on there with its blocks, or after a swap or a prefix hit."""
    fault, options = form
    runners = [load(encoded(name).directory, swap_bytes=1 << 22, **options) for _ in range(2)]
    assert runners[0].info.piece_invariant
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

    def answers(params, **config):
        engine = engine_of(runner, **config)
        engine.admit("a", encoder.prompt_of(read, "prompt"), params)
        engine.finish(10_000)
        return [engine.tokens[f"a.{branch}"] for branch in range(params.n)]

    check_branches_and_beams(answers, lambda most, **options: model.generate(read, most, **options))


def rounded(model, scheme):
    """The model with its linear layers rounded, of the output projection to 8 bits; but for those of few columns."""
    copied = copy.deepcopy(model)
    for name, layer in copied.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer.in_features % 32 == 0:
            eight = scheme.startswith("q8") or name == "lm_head"
            kind = gguf.GGMLQuantizationType.Q8_0 if eight else gguf.GGMLQuantizationType.Q4_0
            rows = dequantize(quantize(layer.weight.detach().numpy(), kind), kind)
            layer.weight = torch.nn.Parameter(torch.from_numpy(rows).view(layer.weight.shape))
    return copied


@extended
@pytest.mark.parametrize(("name", "scheme"), [("t5-gated", "q8"), ("t5", "q4"), ("marian", "q8"), ("bart", "q4")])
def test_layers_are_rounded(name, scheme, encoded, load, monkeypatch, tmp_path):
    """The tokens are those of a model with the rounded numbers. A second start finds layers packed."""
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    model = encoded(name)
    options = {"quantization": scheme, "packed_cache": str(tmp_path / "packed")}
    prompts = {f"p{length}": text(length, length) for length in (7, 30)}
    expected = copy.copy(model)
    expected.model = rounded(model.model, scheme)
    for _ in range(2):
        runner = load(model.directory, **options)
        assert runner.info.piece_invariant
        assert f"({scheme}" in runner._decoder.name
        assert "inputs 15 bits" in runner._decoder.name
        found = outputs_of(engine_of(runner), prompts)
        assert found == {key: expected.generate(read, 20) for key, read in prompts.items()}
        assert len(list((tmp_path / "packed").glob("*.packed"))) == 1
    if name == "bart":  # T5 repeats a token or two, whatever its numbers
        assert found != {key: model.generate(read, 20) for key, read in prompts.items()}
    assert "8 bits" in load(model.directory, quantization=f"{scheme}-a8")._decoder.name


@extended
@pytest.mark.parametrize(("name", "formats"), [("t5", {"q8_rows"}), ("bart", {"q8_rows"}), ("wide", {"q8", "q8_rows"})])
def test_by_q8_a8_rows_have_one_scale(name, formats, encoded, load, monkeypatch, tmp_path):
    """But for the output projection, and for T5's layers of inputs whose sizes differ most."""
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    model = TinyEncoded("t5", tmp_path, d_ff=64) if name == "wide" else encoded(name)
    options = {"quantization": "q8-a8", "packed_cache": str(tmp_path / "packed")}
    for _ in range(2):  # the second one finds layers packed
        decoder = load(model.directory, **options)._decoder
        layers = {key: each.weight.format for key, each in decoder.packed.tensors.items() if "lm_head" not in key}
        assert set(layers.values()) == formats
        assert all((each == "q8") == key.endswith(".wo.weight") for key, each in layers.items())
    assert len(list((tmp_path / "packed").glob("*.packed"))) == 1
    encoded_tokens, exact = text(30), load(model.directory)._decoder
    found, expected = decoder.encode(encoded_tokens), exact.encode(encoded_tokens)
    assert 0 < float((found - expected).abs().mean() / expected.std()) < 0.03


def test_what_is_not_served_is_refused_by_name(encoded, load, tmp_path, monkeypatch):
    model = encoded("bart")
    with pytest.raises(InvalidArgument, match=r"^quantization: auto-a8: .* say q8-a8"):
        load(model.directory, quantization="auto-a8")
    for attribute, value in (("decoder_start_token_id", 264), ("forced_bos_token_id", -1)):
        with monkeypatch.context() as patch:
            patch.setattr(model.model.generation_config, attribute, value)
            model.model.save_pretrained(tmp_path / attribute)
        with pytest.raises(BadModel, match=f"{attribute} {value}"):
            load(tmp_path / attribute)


def test_a_model_that_computes_otherwise_is_found_out(encoded, load, monkeypatch):
    """As if a later Transformers called attention in another way."""
    from gpu_worker.models.through_transformers import encoder_decoder

    monkeypatch.setattr(encoder_decoder, "_place", lambda module, given, named: (given, named))
    with pytest.raises(BadModel, match="through pages its logits differ"):
        load(encoded("bart").directory)
