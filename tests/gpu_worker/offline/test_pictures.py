"""LLM.chat with pictures gives the tokens of Transformers' own generate, whatever is cached, cut or computed again."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from effort import some
from folder_qwen_vl import PAD, data_url, file_of, folder_qwen_vl, picture, shown, text_part
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from gpu_worker.offline.llm import LLM
from gpu_worker.offline.params import OfflineParams
from gpu_worker.ops import native
from gpu_worker.outputs import RequestOutput
from octavo.pictures.picture import Picture
from octavo.request.errors import BadModel, InvalidArgument

GREEDY = OfflineParams(temperature=0, max_tokens=12, ignore_eos=True)
ONE, OTHER = picture(150, 90), picture(70, 200, seed=1)


KINDS = ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"]


@pytest.fixture(scope="module", params=some(KINDS, ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_qwen_vl(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), block_size=16, kv_cache_bytes=4 << 20, max_batch_tokens=32) as made:
        yield made


@pytest.fixture(scope="module")
def reference(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def chat_of(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


def ask(llm: LLM, *parts: object, **options: object) -> RequestOutput:
    return llm.chat(chat_of(*parts), GREEDY, use_tqdm=False, **options)[0]


def expected(model: transformers.PreTrainedModel, prompt: list[int], images: list[Image.Image]) -> list[int]:
    """The tokens of Transformers, whose processor prepares the pictures from the start."""
    said = json.loads((Path(model.name_or_path) / "preprocessor_config.json").read_text())
    size = {"shortest_edge": said.pop("min_pixels"), "longest_edge": said.pop("max_pixels")}
    prepared = Qwen2VLImageProcessorPil(size=size, **said)(images, return_tensors="pt")
    assert int(prepared["image_grid_thw"].prod(-1).sum()) // 4 == prompt.count(PAD)
    ids = torch.tensor([prompt])
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == PAD).int(),
        **prepared,
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    return found[0, len(prompt) :].tolist()


def test_tokens_are_those_of_transformers(llm: LLM, reference: transformers.PreTrainedModel) -> None:
    """Alone and beside others, in pieces of 32 tokens, and again with all that the prefix cache has."""
    chats = [
        chat_of(shown(file_of(ONE)), text_part("what is it?")),
        chat_of(text_part("first "), shown(file_of(OTHER)), text_part(" or "), shown(file_of(ONE)), text_part("?")),
        chat_of(text_part("no picture")),
    ]
    images = [[ONE], [OTHER, ONE], []]
    outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    for output, shown_images in zip(outputs[:2], images, strict=False):
        assert output.outputs[0].token_ids == expected(reference, output.prompt_token_ids, shown_images)
    again = [ask(llm, *chat[0]["content"]) for chat in chats]
    assert [each.outputs[0].token_ids for each in again] == [each.outputs[0].token_ids for each in outputs]
    assert all(each.num_cached_tokens >= len(each.prompt_token_ids) // 16 * 16 - 16 for each in again)


@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
def test_text_runs_on_our_decoder_also_of_the_first_files_rounded_and_with_guesses(tmp_path: Path) -> None:
    """The first files of Qwen2-VL have other names. What is rounded has a fingerprint of its own."""
    folder, chat = folder_qwen_vl(tmp_path / "m", "qwen2_vl"), (shown(file_of(ONE)), text_part("what is it? " * 3))

    def answer(**options: object) -> tuple[str, str, tuple[int, ...]]:
        with LLM(str(folder), block_size=16, kv_cache_bytes=4 << 20, **options) as llm:
            info = llm.engine.workload.info
            return info.fingerprint, info.numerics, tuple(ask(llm, *chat).outputs[0].token_ids)

    found = answer()
    assert (
        found == answer(speculation="recent") == answer(speculation="off")
        and "/pictures/float32/" in found[1]
        and "/by-ops" not in found[1]
    )
    rounded = answer(quantization="q8")
    assert rounded[0] != found[0] and "q8" in rounded[1]
    file, old = folder / "model.safetensors", re.compile(r"model\.(?:(visual\.)|language_model\.)")
    tensors = {old.sub(lambda name: name[1] or "model.", key): value for key, value in load_file(file).items()}
    assert any(name.startswith("visual.") for name in tensors)
    save_file(tensors, file)
    assert answer()[1:] == found[1:]
    save_file({name: value for name, value in tensors.items() if not name.startswith("visual.blocks.1")}, file)
    with pytest.raises(BadModel, match="weights the checkpoint lacks: blocks"):
        LLM(str(folder))
    for more, what in (
        ("model.projector", "no place for: model.projector"),
        ("model.language_model.norm.weight", "twice"),
    ):
        save_file(tensors | {more: torch.zeros(64)}, file)
        with pytest.raises(BadModel, match=what):
            LLM(str(folder))
    bias = next(name for name in tensors if name.startswith("visual.") and name.endswith("bias"))
    save_file(tensors | {bias: torch.full_like(tensors[bias], float("nan"))}, file)
    with pytest.raises(BadModel, match="not finite"):
        LLM(str(folder))
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["rope_parameters"]["mrope_section"]  # then it is that of 64 pairs
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModel, match=r"mrope_section: \[16, 24, 24\] do not divide 8 pairs"):
        LLM(str(folder))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_the_flat_configuration_of_the_first_files_means_the_same(kind: str, tmp_path: Path) -> None:
    folder, chat = folder_qwen_vl(tmp_path / "m", kind), (shown(file_of(ONE)), text_part("what is it?"))

    def answer() -> tuple[str, tuple[int, ...]]:
        with LLM(str(folder), block_size=16, kv_cache_bytes=4 << 20) as llm:
            return llm.engine.workload.info.numerics, tuple(ask(llm, *chat).outputs[0].token_ids)

    found, config = answer(), json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {key: value for key, value in text.items() if key not in ("model_type", "architectures", "layer_types")}
    flat |= {"rope_theta": rope["rope_theta"]}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(flat | config))
    assert answer() == found


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_keys_in_8_bits_give_the_same_tokens_in_pieces_and_beside_others(folder: Path, cache: str) -> None:
    chats = [chat_of(shown(file_of(ONE)), text_part("what is it?")), chat_of(text_part("or "), shown(file_of(OTHER)))]
    found = []
    for most in (32, 512):
        options = {"kv_cache_dtype": cache, "max_batch_tokens": most}
        with LLM(str(folder), block_size=16, kv_cache_bytes=4 << 20, **options) as llm:
            assert cache in llm.engine.workload.info.layout
            together = llm.chat(chats, GREEDY, use_tqdm=False)
            again = [ask(llm, *chat[0]["content"]) for chat in chats]
            found += [[output.outputs[0].token_ids for output in outputs] for outputs in (together, again)]
    assert found == [found[0]] * 4


def test_several_outputs_of_one_picture_share_it(llm: LLM) -> None:
    parts, before = (shown(file_of(picture(112, 84, seed=3))), text_part("n")), llm.engine.picture_shelf.num_encoded
    alone = ask(llm, *parts).outputs[0].token_ids
    llm.reset_prefix_cache()
    greedy = llm.chat(chat_of(*parts), replace(GREEDY, n=3), use_tqdm=False)[0]
    assert [each.token_ids for each in greedy.outputs] == [alone] * 3
    drawn = replace(GREEDY, n=3, temperature=1.0, seed=5)
    first, second = (llm.chat(chat_of(*parts), drawn, use_tqdm=False)[0].outputs for _ in range(2))
    assert [each.token_ids for each in first] == [each.token_ids for each in second]
    assert len({tuple(each.token_ids) for each in first}) == 3
    assert llm.engine.picture_shelf.num_encoded <= before + 2, "once, and once more where nothing of it is cached"


def test_a_context_counts_the_tokens_of_pictures_and_changes_none(folder: Path, llm: LLM) -> None:
    parts = (shown(file_of(ONE)), text_part("what is it?"))
    found = ask(llm, *parts)
    num_prompt = len(found.prompt_token_ids)
    with LLM(str(folder), block_size=16, kv_cache_bytes=4 << 20, context_tokens=num_prompt + 5) as shorter:
        assert ask(shorter, *parts).outputs[0].token_ids == found.outputs[0].token_ids[:5]
        with pytest.raises(InvalidArgument, match=rf"context of {num_prompt + 5}"):
            ask(shorter, *parts, text_part("and so on"))


def test_an_encoder_whose_states_are_no_hidden_states_is_refused(tmp_path: Path) -> None:
    folder = folder_qwen_vl(tmp_path / "m", hidden_size=96, num_attention_heads=6)
    with pytest.raises(BadModel, match="out_hidden_size"):
        LLM(str(folder))


def test_other_pictures_share_no_blocks_and_each_is_encoded_once(llm: LLM) -> None:
    """Their prompts have the same tokens. What comes before a picture is shared."""
    shelf, before = llm.engine.picture_shelf, llm.engine.picture_shelf.num_encoded
    images = [file_of(picture(150, 90, seed=seed)) for seed in (8, 7, 8)]
    first, second, third = (ask(llm, text_part("x" * 40), shown(image)) for image in images)
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.outputs[0].token_ids == third.outputs[0].token_ids != second.outputs[0].token_ids
    assert 32 <= second.num_cached_tokens < first.prompt_token_ids.index(PAD) < third.num_cached_tokens
    llm.reset_prefix_cache()
    ask(llm, shown(images[0]), text_part("b"))
    assert shelf.num_encoded == before + 2
    memory, cell, small = shelf.memory(), llm.engine.workload.info.pictures.cell, Picture("0" * 32, 0, 3, 4)
    assert memory.encode(small, bytes(3 * 12 * cell**2)).num_bytes == memory.num_bytes_of(small) > 0


def test_a_jpeg_of_a_turned_camera_is_turned(llm: LLM) -> None:
    """By its EXIF, as Transformers turns it."""
    upright = picture(112, 56)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = file_of(upright.rotate(90, expand=True), "PNG", exif=exif)
    plain, told = (ask(llm, shown(data)) for data in (file_of(upright), turned))
    assert plain.outputs[0].token_ids == told.outputs[0].token_ids


def test_what_is_no_picture_is_refused(llm: LLM) -> None:
    for url, what in (
        ("https://example.com/a.png", "nothing is fetched"),
        ("data:image/png;base64,????", "not base64"),
        ("data:text/html,hi", "data URL"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "convert it"),
        (data_url(file_of(ONE)[:900]), "send the whole file"),
    ):
        with pytest.raises(InvalidArgument, match=what) as refused:
            ask(llm, {"type": "image_url", "image_url": {"url": url}})
        assert refused.value.field == "messages[0][0].content[0].image_url"


def test_tools_do_not_hide_a_picture_and_a_placeholder_needs_one(llm: LLM) -> None:
    """The model's template has no place for tools, so messages say them."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    output = ask(llm, shown(file_of(ONE)), text_part("?"), tools=[tool])
    assert output.prompt_token_ids.count(PAD) == 15
    assert "look" in str(output.prompt)
    with pytest.raises(InvalidArgument, match="show pictures as parts"):
        llm.generate({"prompt_token_ids": [1, PAD, 2]}, GREEDY, use_tqdm=False)
    assert PAD not in ask(llm, text_part("<|image_pad|>")).prompt_token_ids
