"""What a model's folder says of pictures: it is done so, refused by name, or the file is no such file."""

import json

import pytest

from gpu_worker.models.through_transformers.pictures.config import read_patches
from octavo.request.errors import BadModel

PLAIN = {"patch_size": 14, "merge_size": 2}


def patches(folder, content, name="preprocessor_config.json", **config):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return read_patches(folder, config)


def test_both_names_of_the_file_say_the_same(tmp_path):
    said = {**PLAIN, "min_pixels": 7, "size": {"longest_edge": 99}}
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    read = patches(new, {"image_processor": said}, "processor_config.json", image_token_id=5)
    assert patches(old, said, image_token_id=5) == read
    support = read.support
    assert (support.refusal, support.token_id, support.cell) == ("", 5, 28)
    assert (support.min_pixels, support.max_pixels) == (7, 99)


@pytest.mark.parametrize(
    ("content", "config", "words"),
    [
        ({}, {}, "has no preprocessor_config.json"),
        ({**PLAIN, "image_processor_type": "CLIPImageProcessor"}, {}, "'CLIPImageProcessor' is none of Qwen2VL"),
        ({**PLAIN, "do_pad": True}, {}, "do_pad is 'True', which is not done here"),
        (PLAIN, {"vision_config": {"patch_size": 16}}, "not those of vision_config"),
    ],
)
def test_another_processor_takes_no_pictures(tmp_path, content, config, words):
    assert words in patches(tmp_path, content, **config).support.refusal


@pytest.mark.parametrize(
    "content",
    ["[]", "{", {**PLAIN, "image_mean": 3}, {**PLAIN, "image_std": [1, 0, 1]}, {**PLAIN, "rescale_factor": "x"}],
)
def test_what_cannot_be_read_is_no_model(tmp_path, content):
    with pytest.raises(BadModel, match=r"preprocessor_config\.json"):
        patches(tmp_path, content)
