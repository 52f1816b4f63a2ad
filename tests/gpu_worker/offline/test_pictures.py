"""LLM.chat with pictures gives the tokens of Transformers' own generate, whatever is cached, cut or computed again."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from folder_qwen_vl import PAD, data_url, file_of, folder_qwen_vl, picture, shown, text_part
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from gpu_worker.offline.llm import LLM
from gpu_worker.offline.params import OfflineParams
from octavo.pictures.picture import Picture
from octavo.request.errors import InvalidArgument

GREEDY = OfflineParams(temperature=0, max_tokens=12, ignore_eos=True)
ONE, OTHER = picture(150, 90), picture(70, 200, seed=1)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"])
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
    again = [llm.chat(chat, GREEDY, use_tqdm=False)[0] for chat in chats]
    assert [each.outputs[0].token_ids for each in again] == [each.outputs[0].token_ids for each in outputs]
    assert all(each.num_cached_tokens >= len(each.prompt_token_ids) // 16 * 16 - 16 for each in again)


def test_other_pictures_share_no_blocks(llm: LLM) -> None:
    """Their prompts have the same tokens. What comes before a picture is shared."""
    before = "x" * 40
    same_size = picture(150, 90, seed=7)
    first, second = (
        llm.chat(chat_of(text_part(before), shown(file_of(image))), GREEDY, use_tqdm=False)[0]
        for image in (ONE, same_size)
    )
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    assert 32 <= second.num_cached_tokens < first.prompt_token_ids.index(PAD)


def test_a_picture_is_encoded_once(llm: LLM) -> None:
    before = llm.engine.picture_shelf.num_encoded
    data = file_of(picture(64, 64, seed=11))
    for text in ("a", "b"):
        llm.reset_prefix_cache()
        llm.chat(chat_of(shown(data), text_part(text)), GREEDY, use_tqdm=False)
    assert llm.engine.picture_shelf.num_encoded == before + 1


def test_a_picture_takes_the_memory_that_is_counted_before(llm: LLM) -> None:
    memory, cell = llm.engine.picture_shelf.memory(), llm.engine.workload.info.pictures.cell
    encoded = memory.encode(Picture("0" * 32, 0, 3, 4), bytes(3 * 12 * cell**2))
    assert encoded.num_bytes == memory.num_bytes_of(Picture("0" * 32, 0, 3, 4)) > 0


def test_a_jpeg_of_a_turned_camera_is_turned(llm: LLM) -> None:
    """By its EXIF, as Transformers turns it."""
    upright = picture(112, 56)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = file_of(upright.rotate(90, expand=True), "PNG", exif=exif)
    plain, told = (llm.chat(chat_of(shown(data)), GREEDY, use_tqdm=False)[0] for data in (file_of(upright), turned))
    assert plain.outputs[0].token_ids == told.outputs[0].token_ids


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("https://example.com/a.png", "nothing is fetched"),
        ("data:image/png;base64,????", "not base64"),
        ("data:text/html,hi", "data URL"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "convert it"),
        (data_url(file_of(ONE)[:900]), "send the whole file"),
    ],
)
def test_what_is_no_picture_is_refused(llm: LLM, url: str, what: str) -> None:
    with pytest.raises(InvalidArgument, match=what) as refused:
        llm.chat(chat_of({"type": "image_url", "image_url": {"url": url}}), GREEDY, use_tqdm=False)
    assert refused.value.field == "messages[0][0].content[0].image_url"


def test_tools_do_not_hide_a_picture(llm: LLM) -> None:
    """The model's template has no place for tools, so messages say them."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    output = llm.chat(chat_of(shown(file_of(ONE)), text_part("?")), GREEDY, tools=[tool], use_tqdm=False)[0]
    assert output.prompt_token_ids.count(PAD) == 15
    assert "look" in str(output.prompt)


def test_placeholders_without_a_picture_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="show pictures as parts"):
        llm.generate({"prompt_token_ids": [1, PAD, 2]}, GREEDY, use_tqdm=False)
    spelled = llm.chat(chat_of(text_part("<|image_pad|>")), GREEDY, use_tqdm=False)[0]
    assert PAD not in spelled.prompt_token_ids
