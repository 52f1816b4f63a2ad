"""GGUF weights: number formats, and whole models through a GGUF file and back."""

import re
from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
import transformers
from differences import difference
from effort import diagonal, some
from gguf.quants import dequantize as theirs
from gguf_models import MIXTURES, finish, write_bare, write_gguf, write_values
from instruction_sets import OPS
from safetensors.torch import load_file

from gpu_worker.models.gguf.llama_like import read_config
from gpu_worker.models.gguf.tensors import KERNELS, PIECE_VALUES, ROPE_FACTORS, ROPE_LONG, dequantize
from gpu_worker.ops import native
from octavo.cli.doctor.model_size import AS_STORED
from octavo.model_files.gguf import GgufFile, TensorType
from octavo.model_files.gguf_support import ARCHITECTURES, DECODED, FLOATS, HELD_AS
from octavo.request.errors import BadModel, InvalidArgument
from octavo.text.tokenizers.tokenizer import open_tokenizer

PACKED = [kind.name for kind in DECODED if kind not in FLOATS]
OWN_KERNELS = (
    *("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    *(kind.name for kind in HELD_AS),
)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", *PACKED])
def test_pieces_of_every_format_are_decoded_like_the_whole(name):
    """Random bytes, more than one piece of them, and a piece that is not full."""
    kind = TensorType[name]
    size, num_bytes = kind.block, kind.num_bytes
    num_values = PIECE_VALUES + 7 * 256
    data = np.random.default_rng(5).integers(0, 256, num_values // size * num_bytes, dtype=np.uint8)
    with np.errstate(all="ignore"):  # scales that are no numbers are among them
        expected = theirs(data, gguf.GGMLQuantizationType[name]).reshape(-1)
        values = dequantize(memoryview(data.tobytes()), kind, num_values)
    assert values.dtype == np.float32 and values.flags.writeable
    np.testing.assert_array_equal(values, expected)
    assert np.isfinite(values).mean() > 0.9


PROMPT = [(7 * i + 3) % 128 for i in range(50)]
PROMPTS = [[(i * 5 + 3) % 128 for i in range(length)] for length in (30, 2)]
STORED = [
    *("llama", "llama-biases", "qwen3", "smollm3"),
    *("gemma2-untied", "gemma2-tied", "phi3", "phi3-tied", "phi3-longrope"),
]


@pytest.mark.parametrize(("name", "on_ops"), diagonal(STORED, OPS), indirect=["on_ops"])
@pytest.mark.usefixtures("on_ops")
def test_a_gguf_file_says_what_transformers_says(name, tiny, load, all_logits, greedy, tmp_path):
    """The model that was stored, not read again: nothing of it may be lost on the way into the file and back."""
    model, path = tiny(name), tmp_path / "model.gguf"
    write_gguf(model.directory, path)
    runner = load(path, quantization="none")
    assert difference(all_logits(runner, PROMPT), model.logits(PROMPT)) < 1e-4
    for prompt, output in zip(PROMPTS, greedy(runner, PROMPTS, 48), strict=True):
        assert output == model.greedily(prompt, output)
        assert len(set(output)) > 4 or name == "gemma2-tied", "a model that repeats itself tests little"


def test_other_architectures_are_refused_by_name(load, tmp_path):
    with pytest.raises(BadModel, match=rf"'plamo' are not read \({', '.join(ARCHITECTURES)} are\)"):
        load(write_bare(tmp_path / "model.gguf", "plamo", 1, {"token_embd": (8, 64)}))
    with pytest.raises(BadModel, match="has 8 experts"):
        load(write_bare(tmp_path / "experts.gguf", "qwen2", 1, {"token_embd": (8, 64)}, expert_count=8))
    for name, layers, words in (("output", 1, "has no token_embd"), ("token_embd", 9, "9 layers in 1 tensors")):
        with pytest.raises(BadModel, match=words):
            load(write_bare(tmp_path / f"{name}.gguf", "qwen2", layers, {name: (8, 64)}))


def with_settings(**settings: float | str) -> Callable[[gguf.GGUFWriter], None]:
    """For `describe_tokens`: further settings of a llama, whose names have __ for a dot."""

    def describe(writer: gguf.GGUFWriter) -> None:
        for name, value in settings.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](f"llama.{name.replace('__', '.')}", value)

    return describe


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention__causal": False}, r"llama\.attention\.causal is false: it predicts no next token"),
        ({"attention__value_length": 99}, "keys and values have different sizes"),
        ({"logit_scale": 3.0, "attention__scale": 0.5}, r"does not know, .*: llama\.attention\.scale, llama\.logit_sc"),
        ({"rope__scaling__type": "longrope"}, r"llama\.rope\.scaling\.type 'longrope' is not read"),
    ],
)
def test_a_setting_that_would_change_tokens_is_refused_by_name(settings, words, tiny, load, tmp_path):
    write_gguf(tiny("llama").directory, tmp_path / "model.gguf", describe_tokens=with_settings(**settings))
    with pytest.raises(BadModel, match=words):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scaling__factor": 4.0, "rope__scaling__type": "none", "expert_count": 0}, {}),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__yarn_beta_fast": 8.0},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "beta_fast": 8.0},
        ),
    ],
)
def test_positions_are_scaled_as_llama_cpp_scales_them(settings, expected, tiny, tmp_path):
    """Files of 2023 have a factor without a type, or by another name."""
    write_gguf(tiny("llama").directory, tmp_path / "model.gguf", describe_tokens=with_settings(**settings))
    with GgufFile(tmp_path / "model.gguf") as file:
        found = read_config(file)["rope_parameters"]
    assert found == {"rope_theta": 10000.0, "partial_rotary_factor": 1.0} | expected


def test_half_of_the_factors_of_long_positions_is_refused(tiny, load, tmp_path):
    write_gguf(tiny("phi3").directory, tmp_path / "model.gguf", extra={ROPE_LONG: np.ones(4, np.float32)})
    with pytest.raises(BadModel, match="has only one of"):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("qwen2", "model.layers.2.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.3.self_attn.q_norm.weight"),
    ],
)
def test_a_file_that_lacks_a_tensor_is_refused_by_name(name, dropped, tiny, load, tmp_path):
    """Of parts that the file need not have, those of the first layer tell what the others have."""
    weights = load_file(tiny(name).directory / "model.safetensors")
    del weights[dropped]
    write_gguf(write_values(tiny(name).directory, tmp_path / "less", weights), tmp_path / "model.gguf")
    with pytest.raises(BadModel, match=rf"no tensor '{re.escape(dropped)}'"):
        load(tmp_path / "model.gguf")


def test_a_file_with_another_type_is_refused_by_name(load, tmp_path):
    """At once, with the names of those that are read."""
    for name in (kind.name for kind in TensorType if kind not in DECODED):
        kind = gguf.GGMLQuantizationType[name]
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "llama")
        writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
        rows = np.zeros((8, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        writer.add_tensor("blk.0.attn_q.weight", rows, raw_dtype=kind)
        finish(writer)
        with pytest.raises(BadModel, match=rf"tensor 'blk\.0\.attn_q\.weight' is of type {name}, which is .* \(F32, "):
            load(tmp_path / f"{name}.gguf")


@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
@pytest.mark.parametrize(
    "kind", some(["F16", "BF16", *PACKED], {"F16", "Q4_0", "Q4_1", "Q5_K", "IQ4_NL", "TQ2_0", "IQ3_XXS"})
)
def test_a_file_of_each_type_in_each_scheme(kind, tiny, load, all_logits, greedy, tmp_path):
    """`none` computes what Transformers does of the same numbers; the other schemes round as they round those."""
    path = tmp_path / "model.gguf"
    values = write_gguf(tiny("llama-wide").directory, path, kind)
    plain = write_values(tiny("llama-wide").directory, tmp_path / "plain", values)
    exact = load(path, quantization="none")
    model = transformers.AutoModelForCausalLM.from_pretrained(plain).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    assert difference(all_logits(exact, PROMPT), expected) < 1e-4
    (prompt,), (output,) = PROMPTS[:1], greedy(exact, PROMPTS[:1], 24)
    with torch.inference_mode():
        rows = model(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    assert output == rows.argmax(-1).tolist()
    for scheme in ("q8", "q4"):
        rounded = all_logits(load(plain, quantization=scheme), PROMPT)
        assert torch.equal(all_logits(load(path, quantization=scheme), PROMPT), rounded)
    automatic = all_logits(load(path, quantization="auto"), PROMPT)
    if kind in OWN_KERNELS:
        assert difference(automatic, expected) < 0.05
    if kind in ("F16", "BF16"):
        with pytest.raises(InvalidArgument, match=r"^quantization: auto-a8: inputs .* say q8-a8 or q4-a8"):
            load(path, quantization="auto-a8")
    elif kind in OWN_KERNELS:
        coarse = load(path, quantization="auto-a8")
        assert 0 < difference(all_logits(coarse, PROMPT), automatic) < 0.3
        assert coarse.info.fingerprint != exact.info.fingerprint
    else:  # there is no kernel for this type: 8 bits
        assert torch.equal(automatic, all_logits(load(plain, quantization="q8"), PROMPT))


def test_the_doctor_knows_which_types_are_kept():
    assert set(AS_STORED) == {*FLOATS, *KERNELS, TensorType.MXFP4} - set(HELD_AS)


@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
@pytest.mark.parametrize(
    ("name", "kinds", "formats"), [*(("llama-wide", *each) for each in MIXTURES), ("phi3-wide", *MIXTURES[-1])]
)
def test_a_mixture_runs_on_its_own_bits(name, kinds, formats, tiny, load, all_logits, tmp_path):
    """Also where matrices that lie side by side are of two types: nothing is rounded but inputs."""
    path = tmp_path / "model.gguf"
    values = write_gguf(tiny(name).directory, path, kinds)
    plain = write_values(tiny(name).directory, tmp_path / "plain", values)
    expected = all_logits(load(plain, quantization="none"), PROMPT)
    for scheme, inputs, error in (("none", "float32", 2e-5), ("auto", "15-bits", 5e-3 if formats else 0.05)):
        runner = load(path, quantization=scheme)
        assert not formats or f"/{formats}/in={inputs}/" in runner.info.numerics
        assert difference(all_logits(runner, PROMPT), expected) < error
    if not formats:
        for scheme in ("q8", "q4"):
            rounded = all_logits(load(plain, quantization=scheme), PROMPT)
            assert difference(all_logits(load(path, quantization=scheme), PROMPT), rounded) < 2e-5


LOSSES = {"auto": (1e-3, 0.98), "auto-a8": (1e-2, 0.95)}  # at most, of the largest logit; and how many have none
SHARE, FILE = 0.1, "model.safetensors"
STARTS = [[(i * 5 + 3 + at * 11) % 128 for i in range(length)] for at, length in enumerate((30, 2, 17, 50))]


@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
@pytest.mark.parametrize("scheme", LOSSES)
@pytest.mark.parametrize("number", some(range(4), [1]))
def test_greedy_tokens_of_a_mixture_are_those_of_a_decoder_in_floats(number, scheme, tiny, load, greedy, tmp_path):
    """Or others whose logit is as large there, but for what the rounding of inputs may change of the two.

    Random blocks all point one way, so that each token would be the same one if layers counted much here beside the
    embedding, which is that of the model.
    """

    def kinds(tensor: str) -> str:
        return MIXTURES[number][0](tensor) if "layers" in tensor else "Q8_0"

    source = tiny("llama-wide").directory
    quiet = {name: each * (SHARE if "layernorm" in name else 1) for name, each in load_file(source / FILE).items()}
    source = write_values(source, tmp_path / "quiet", quiet)
    values = write_gguf(source, tmp_path / "model.gguf", kinds)
    plain = write_values(source, tmp_path / "plain", values)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    losses, seen = [], set()
    outputs = greedy(load(tmp_path / "model.gguf", quantization=scheme), STARTS, 48)
    for prompt, output in zip(STARTS, outputs, strict=True):
        seen |= set(output)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        losses.append((logits.max(dim=1).values - chosen) / logits.abs().max())
    found, (most, least) = torch.cat(losses), LOSSES[scheme]
    assert len(seen) > 16, "a model that repeats itself tests little"
    assert found.max() <= most
    assert (found < 1e-5).float().mean() >= least


def test_a_file_without_a_vocabulary_takes_token_ids(tiny, load, tmp_path):
    """Routers read the tokenizer of the path that a worker names, and leave out a worker whose path has none."""
    for kind in ("", "none", "no_vocab", "gpt2"):
        path = tmp_path / f"of-{kind}.gguf"
        describe = (lambda writer, kind=kind: writer.add_tokenizer_model(kind)) if kind else None
        write_gguf(tiny("llama").directory, path, describe_tokens=describe)
        found = load(path).info.tokenizer
        assert found == (str(path) if kind == "gpt2" else "")
    assert not open_tokenizer("").has_text


# Whole models, once more


def test_a_model_in_several_files_says_the_same(tiny, load, all_logits, tmp_path):
    """A directory with the files is the model, too. Another last part is another model."""
    directory = tiny("llama-wide").directory
    write_gguf(directory, tmp_path / "whole.gguf", "Q8_0")
    (tmp_path / "parts").mkdir()
    write_gguf(directory, tmp_path / "parts/model.gguf", "Q8_0", in_part=8)
    files = sorted((tmp_path / "parts").iterdir())
    assert len(files) == 3
    expected = all_logits(load(tmp_path / "whole.gguf"), PROMPT)
    for path in (files[0], tmp_path / "parts"):
        runner = load(path)
        assert torch.equal(all_logits(runner, PROMPT), expected)
        assert runner.info.model == "model"
    with pytest.raises(BadModel, match="this is part 2 of the 3 of a model: give the first"):
        load(files[1])
    content = bytearray(files[-1].read_bytes())
    content[-40] ^= 1
    files[-1].write_bytes(content)
    assert load(files[0]).info.fingerprint != runner.info.fingerprint


@pytest.mark.parametrize(("name", "kind"), [("llama-biases", "F32"), ("llama-wide", "Q8_0"), ("qwen3", "F32")])
def test_queries_keys_and_values_in_one_tensor_are_taken_apart(
    name, kind, tiny, load, all_logits, tmp_path, monkeypatch
):
    """As the converter writes them with --fuse-qkv: rows of queries and keys are interleaved, of values not."""
    write_gguf(tiny(name).directory, tmp_path / "apart.gguf", kind)
    add, held = gguf.GGUFWriter.add_tensor, dict[str, np.ndarray]()

    def add_fused(writer, stored, array, **more):
        held[stored] = array
        fused = re.sub(r"attn_[qkv]\.", "attn_qkv.", stored)
        parts = [stored] if fused == stored else [fused.replace("qkv", part) for part in "qkv"]
        if all(part in held for part in parts):
            add(writer, fused, np.concatenate([held[part] for part in parts]), **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_fused)
    write_gguf(tiny(name).directory, tmp_path / "fused.gguf", kind)
    expected = all_logits(load(tmp_path / "apart.gguf"), PROMPT)
    assert torch.equal(all_logits(load(tmp_path / "fused.gguf"), PROMPT), expected)


def test_rope_factors_divide_frequencies(tiny, altered, load, greedy, tmp_path):
    """llama.cpp stores Llama 3's scaling so. Factors of 2 everywhere are linear scaling by 2."""
    path = tmp_path / "model.gguf"
    write_gguf(tiny("llama").directory, path, extra={ROPE_FACTORS: np.full(4, 2.0, np.float32)})
    rope = {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": tiny("llama").model.config.rope_parameters["rope_theta"],
    }
    expected = greedy(load(altered("llama", rope_parameters=rope)), PROMPTS, 24)
    assert greedy(load(path, quantization="none"), PROMPTS, 24) == expected
    assert greedy(load(tiny("llama").directory), PROMPTS, 24) != expected, "the factors change nothing here"
