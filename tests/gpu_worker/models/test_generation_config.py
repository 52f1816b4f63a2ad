"""What generation_config.json recommends, and what of it is taken."""

import json

import pytest
from parameter_values import beyond, inside

from gpu_worker.models.generation_config import read_generation_config, sampling_defaults
from octavo.request.errors import BadModel
from octavo.request.sampling import PARAMETERS, ParameterKind

ROWS = [row for row in PARAMETERS.values() if row.transformers]
EVERYTHING = {row.transformers: inside(row)[-1] for row in ROWS}
OURS = {row.name: inside(row)[-1] for row in ROWS}
ALWAYS = {row.name: inside(row)[-1] for row in ROWS if row.kind is not ParameterKind.DRAWS}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (EVERYTHING | {"do_sample": True}, OURS),
        (EVERYTHING | {"do_sample": False}, ALWAYS),
        ({"temperature": None, "top_k": 0, "bos_token_id": 1, "max_length": 20}, {"top_k": 0}),
        ({"temperature": 0, "top_k": -1}, {"temperature": 0, "top_k": 0}),
    ],
)
def test_values_are_taken_as_transformers_means_them(content, expected):
    assert dict(sampling_defaults(content)) == expected


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_value_that_no_request_may_have_refuses_the_model(row):
    for value in beyond(row):
        if value is None or (row.transformers == "top_k" and value == -1):
            continue  # what Transformers writes for none
        with pytest.raises(BadModel, match=r"generation_config\.json: .*start the worker with --generation-config off"):
            sampling_defaults({row.transformers: value})


def test_a_runner_knows_them_unless_they_are_off(altered, load):
    directory = altered("llama")
    file = directory / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [7], "temperature": 0.5}))
    assert dict(load(directory).info.sampling_defaults) == {"temperature": 0.5}
    off = load(directory, generation_config="off").info
    assert (dict(off.sampling_defaults), off.eos_token_ids) == ({}, (7,))
    file.write_text(json.dumps({"temperature": 50}))
    with pytest.raises(BadModel, match="temperature 50 is not 0 to 10"):
        load(directory)
    for content in ("{", "[1]"):
        file.write_text(content)
        with pytest.raises(BadModel, match=r"generation_config\.json: "):
            read_generation_config(directory)
    file.unlink()
    assert not read_generation_config(directory)
