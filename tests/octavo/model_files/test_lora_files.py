"""Adapters on disk: one digest for what counts, and a name for each thing that is refused."""

import json
import os
import struct
from contextlib import nullcontext, suppress

import pytest
import torch
from loras import write_files
from safetensors.torch import load_file, save_file

from octavo.model_files.lora_files import CONFIG, MAX_BYTES, MAX_HEADER, WEIGHTS, read_lora
from octavo.model_files.lora_support import NO_LORA, LoraSupport, check_any
from octavo.model_files.lora_tensors import LoraMatrix
from octavo.request.errors import BadModel, NotFound, ServingError, TooLarge, Unimplemented

LAYER = "base_model.model.model.layers.1.self_attn.q_proj.lora_"


def tensors(rank=2):
    return {f"{LAYER}A.weight": torch.ones(rank, 3), f"{LAYER}B.weight": torch.full((4, rank), 2.0)}


@pytest.fixture
def lora(tmp_path):
    return write_files(tmp_path / "a", tensors(), {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]})


def reconfigure(folder, **changes):
    content = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(content))


def test_an_adapter_is_read(lora):
    found = read_lora(lora)
    assert (found.rank, found.scale, found.num_bytes) == (2, 4.0, 2 * 3 * 4 + 4 * 2 * 4)
    a = found.tensors[LoraMatrix(1, "q_proj", "A")]
    assert struct.unpack_from("<6f", found.content, a.start) == (1.0,) * 6
    assert read_lora(lora, found.digest).digest == found.digest
    with pytest.raises(BadModel, match=f"has the digest {found.digest} now, and {'0' * 32} is wanted"):
        read_lora(lora, "0" * 32)
    reconfigure(lora, use_rslora=True)
    assert read_lora(lora).scale == 8 / 2**0.5


def test_the_digest_is_that_of_what_counts(lora, tmp_path):
    first = read_lora(lora).digest
    reconfigure(lora, lora_dropout=0.5, base_model_name_or_path="elsewhere", target_modules="all-linear")
    reconfigure(lora, layers_to_transform=[1], layers_pattern="layers", rank_pattern={}, alpha_pattern={})
    reconfigure(lora, ensure_weight_tying=False)
    save_file(dict(reversed(tensors().items())), lora / WEIGHTS, metadata={"format": "pt"})
    lora = lora.rename(tmp_path / "renamed")
    assert read_lora(lora).digest == first
    digests, before = {first}, (lora / CONFIG).read_text()
    for change in ({"lora_alpha": 9}, {"use_rslora": True}):
        reconfigure(lora, **change)
        digests.add(read_lora(lora).digest)
        (lora / CONFIG).write_text(before)
    a, b = f"{LAYER}A.weight", f"{LAYER}B.weight"
    for changed in (
        tensors() | {a: torch.ones(2, 3, dtype=torch.bfloat16)},
        tensors() | {a: torch.tensor([[1.0, 1, 1], [1, 1, 1 + 2**-23]])},
        tensors() | {b: torch.full((4, 2), 2.0) * torch.tensor([1.0, -1.0])},
        tensors() | {a: torch.ones(2, 6)},
        {name.replace("layers.1", "layers.0"): tensor for name, tensor in tensors().items()},
    ):
        save_file(changed, lora / WEIGHTS)
        digests.add(read_lora(lora).digest)
    assert len(digests) == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not LORA"),
        ({"use_dora": True}, "use_dora True is not computed here"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not computed here"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not computed here"),
        ({"rank_pattern": {"q_proj": 4}}, "is not of rank 4"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern {'q_proj': 0} is not a whole number"),
        ({"alpha_pattern": {"q_proj": "4"}}, "alpha_pattern {'q_proj': '4'} is no number"),
        ({"rank_pattern": {"(a+)+b": 4}}, r"rank_pattern has the expression '\(a\+\)\+b': only names of modules"),
        ({"alpha_pattern": ["q_proj"]}, r"alpha_pattern \['q_proj'\] has no names"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying True is not computed here"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the weights of the model"),
        ({"a_setting_of_tomorrow": 1}, "a_setting_of_tomorrow 1 is not computed here"),
        ({"r": 0}, "r 0 is not a whole number from 1 to 256"),
        ({"r": 4}, "is not of rank 4"),
        ({"lora_alpha": "8"}, "lora_alpha '8' is no number"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan is no number"),
        ({"lora_alpha": 10**400}, "int too large"),
    ],
)
def test_a_setting_that_is_not_computed_is_refused_by_its_name(lora, change, words):
    reconfigure(lora, **change)
    with pytest.raises(BadModel, match=words):
        read_lora(lora)


MODEL = "base_model.model."


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{MODEL}model.embed_tokens.lora_embedding_A", f"tensor {MODEL}model.embed_tokens"),
        (f"{MODEL}lm_head.lora_A.weight", f"tensor {MODEL}lm_head.lora_A.weight"),
        (f"{LAYER}magnitude_vector", "magnitude_vector is not computed here"),
        (f"{MODEL}model.layers.1.mlp.experts.0.up_proj.lora_A.weight", "experts"),
        (f"{MODEL}model.layers.0.mlp.up_proj.lora_A.weight", "layer 0 has one of lora_A and lora_B of up_proj"),
    ],
)
def test_a_tensor_that_is_not_computed_is_refused_by_its_name(lora, name, words):
    save_file(tensors() | {name: torch.ones(2, 3)}, lora / WEIGHTS)
    with pytest.raises(BadModel, match=words):
        read_lora(lora)


@pytest.mark.parametrize(
    "header", [b"null", b'"abc"', b"[]", b"1", b'{"a": null}', b'{"a": []}', b"[" * 100_000, b'{"a":' * 100_000]
)
def test_an_odd_header_is_refused(lora, header):
    (lora / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(BadModel, match=str(lora)):
        read_lora(lora)


@pytest.mark.parametrize("spelling", ["base_model.model.layers.1.", "base_model.model.model.layers.01."])
def test_a_tensor_with_two_spellings_is_refused(lora, spelling):
    again = {name.replace("base_model.model.model.layers.1.", spelling): value for name, value in tensors().items()}
    save_file(again, lora / WEIGHTS)
    assert read_lora(lora).rank == 2
    save_file(tensors() | again, lora / WEIGHTS)
    with pytest.raises(BadModel, match=r"layers\.0?1\.self_attn\.q_proj\.lora_[AB]\.weight is there twice"):
        read_lora(lora)


def test_a_file_that_is_too_large_is_not_read(lora, monkeypatch):
    assert read_lora(lora, max_bytes=0).rank == 2  # its header may have as many
    os.truncate(lora / WEIGHTS, MAX_HEADER + 9 + 100)
    with pytest.raises(TooLarge, match=f"file of {MAX_HEADER + 109} bytes is not read: it may have 100"):
        read_lora(lora, max_bytes=100)
    os.truncate(lora / WEIGHTS, MAX_HEADER + 9 + MAX_BYTES)
    with pytest.raises(TooLarge, match=f"it may have {MAX_BYTES}"):
        read_lora(lora)


@pytest.mark.parametrize(
    ("spans", "extra", "words"),
    [
        ([(0, 24), (24, 56)], 0, ""),
        ([(32, 56), (0, 32)], 0, ""),  # in any order
        ([(0, 24), (0, 32)], 24, "overlap, or leave gaps"),
        ([(0, 24), (20, 52)], 4, "overlap, or leave gaps"),
        ([(4, 28), (28, 60)], 4, "overlap, or leave gaps"),
        ([(0, 24), (24, 56)], 7, "7 bytes at its end are no tensor's"),
        ([(0, 24), (24, 56.0)], 0, "does not lie in the file"),
    ],
)
def test_each_byte_is_of_one_tensor(lora, spans, extra, words):
    shapes = {f"{LAYER}A.weight": [2, 3], f"{LAYER}B.weight": [4, 2]}
    places = zip(shapes.items(), spans, strict=True)
    described = {name: {"dtype": "F32", "shape": shape, "data_offsets": span} for (name, shape), span in places}
    header = json.dumps(described).encode()
    (lora / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + bytes(56 + extra))
    with pytest.raises(BadModel, match=words) if words else nullcontext():
        assert read_lora(lora).num_bytes == 56


def test_damaged_files_are_refused_and_crash_nothing(lora, tmp_path):
    whole = (lora / WEIGHTS).read_bytes()
    for cut in (*range(16), *range(16, len(whole), 7)):
        (lora / WEIGHTS).write_bytes(whole[:cut])
        with pytest.raises(BadModel, match="cut off" if cut < 16 else None):
            read_lora(lora)
    for place in range(0, len(whole), 3):
        (lora / WEIGHTS).write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
        with suppress(ServingError):
            read_lora(lora)
    (lora / WEIGHTS).write_bytes(whole)
    save_file({}, lora / WEIGHTS)
    with pytest.raises(BadModel, match="has no tensor"):
        read_lora(lora)
    (lora / WEIGHTS).write_bytes(whole)
    for text in ("", "[]", "{", "null", '{"peft_type": "LORA"}'):
        (lora / CONFIG).write_text(text)
        with pytest.raises(BadModel):
            read_lora(lora)
    (lora / CONFIG).write_text("{")
    with pytest.raises(BadModel, match=r"adapter_config\.json is not JSON: .*; copy it again"):
        read_lora(lora)
    (lora / CONFIG).unlink()
    with pytest.raises(NotFound, match=r"no adapter_config\.json there"):
        read_lora(lora)
    assert load_file(lora / WEIGHTS)


def test_what_is_not_there_is_named_with_the_remedy(lora, tmp_path):
    def said(path):
        with pytest.raises(NotFound) as error:
            read_lora(path)
        return error.value.message

    (tmp_path / "empty").mkdir()
    assert "there is no such folder" in said(tmp_path / "none")
    assert "the folder is empty" in said(tmp_path / "empty")
    assert "no file x.gguf there" in said(tmp_path / "x.gguf")
    assert "is a file: give the folder" in said(lora / WEIGHTS)
    (lora / WEIGHTS).rename(lora / "adapter_model.bin")
    assert "adapter_model.bin, a pickle" in said(lora)
    assert "safe_serialization=True" in said(lora)
    (lora / "x.gguf").touch()
    (lora / CONFIG).unlink()
    assert "x.gguf: give the path of that file" in said(lora)


def test_patterns_give_modules_ranks_and_scales_of_their_own(tmp_path):
    """By what PEFT does: a name counts where a module's name ends with it at a dot; the first one counts."""
    found = {}
    for layer, module, rank in ((0, "q_proj", 4), (1, "q_proj", 8), (0, "k_proj", 2), (1, "k_proj", 2)):
        stem = f"{MODEL}model.layers.{layer}.self_attn.{module}.lora_"
        found |= {f"{stem}A.weight": torch.ones(rank, 3), f"{stem}B.weight": torch.ones(5, rank)}
    patterns = {"rank_pattern": {"layers.0.self_attn.q_proj": 4, "q_proj": 8}}
    patterns |= {"alpha_pattern": {r"^model\.layers.1.self_attn.k_proj": 6}}
    folder = write_files(tmp_path / "a", found, {"r": 2, "lora_alpha": 4, **patterns})
    read = read_lora(folder)
    assert (read.rank, read.scale) == (8, 2.0)
    assert read.scales == {(0, "q_proj"): 1.0, (1, "q_proj"): 0.5, (1, "k_proj"): 3.0}
    reconfigure(folder, alpha_pattern={"k_proj": 6})
    assert read_lora(folder).digest != read.digest
    reconfigure(folder, alpha_pattern={}, rank_pattern={"proj": 8})  # no module's name ends so at a dot
    with pytest.raises(BadModel, match="is not of rank 2"):
        read_lora(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_number_that_is_none_is_refused_with_its_tensor(lora, dtype):
    """All numbers of 16 bits; of 32, those in which the upper half says it, and those in which the lower half does."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if dtype is torch.float32:
        numbers = torch.cat([bits << 16, 0x7F800000 | bits, 0x7F000000 | bits]).view(torch.float32)
    else:
        numbers = bits.to(torch.int16).view(dtype)
    finite = numbers[numbers.isfinite()]
    odd = numbers[~numbers.isfinite()]
    good = {f"{LAYER}A.weight": finite[None, : len(finite)].clone(), f"{LAYER}B.weight": torch.ones(4, 1)}
    reconfigure(lora, r=1)
    save_file(good, lora / WEIGHTS)
    assert read_lora(lora).num_bytes
    for number in odd[:: max(1, len(odd) // 50)]:
        b = torch.ones(4, 1, dtype=dtype)
        b[2, 0] = number
        save_file(good | {f"{LAYER}B.weight": b}, lora / WEIGHTS)
        with pytest.raises(BadModel, match=r"q_proj\.lora_B\.weight has numbers that are infinite or NaN"):
            read_lora(lora)


def test_one_worker_that_takes_an_adapter_is_enough(lora):
    files = read_lora(lora)
    other = LoraSupport(num_layers=2, shapes={"k_proj": (4, 3), "up_proj": (4, 3)}, expert_layers=(0, 1))
    with pytest.raises(BadModel, match="does not have: it has k_proj"):
        check_any(files, [other, NO_LORA])
    with pytest.raises(Unimplemented, match="takes no adapters"):
        check_any(files, [NO_LORA, other])
    for supports in ([], [other, LoraSupport(), NO_LORA]):
        check_any(files, supports)
