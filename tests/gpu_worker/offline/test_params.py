"""Parameters by octavo's and by vLLM's names: checked when they are made, and the same to the engine."""

import pytest
from parameter_values import all_beyond, inside
from refusals import refusal

from gpu_worker.offline.params import BeamSearchParams, OfflineParams
from gpu_worker.offline.structured import StructuredOutputsParams
from octavo.request.errors import InvalidArgument, Unimplemented
from octavo.request.sampling import PARAMETERS, Constraint, SamplingParams, Shape

SAME = [
    ({}, {}),
    ({"max_tokens": None}, {"max_tokens": 2**32 - 1}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"seed": -1}, {"seed": None}),
    ({"best_of": None}, {"best_of": 0}),
    ({"stop": "x"}, {"stop": ("x",)}),
    ({"include_stop_str_in_output": True}, {"include_stop": True}),
    ({"thinking_token_budget": 0}, {"thinking_budget": 0}),
    ({row.name: None for row in PARAMETERS.values() if row.most is not None}, {}),
    ({"logprobs": True, "prompt_logprobs": True}, {"logprobs": 1, "prompt_logprobs": 1}),
    ({"beam_width": 4, "n": 2}, None),
    ({"use_beam_search": True, "n": 2, "best_of": 4, "temperature": 0}, {"beam_width": 4, "n": 2, "temperature": 0}),
    ({"use_beam_search": True, "n": 3, "temperature": 0.0}, {"beam_width": 3, "n": 3, "temperature": 0.0}),
    ({"detokenize": False, "truncate_prompt_tokens": 5, "bad_words": ["x"]}, {}),
    ({"spaces_between_special_tokens": True, "logits_processors": None, "guided_decoding": None}, {}),
]


@pytest.mark.parametrize(("given", "expected"), SAME, ids=[str(given) for given, _ in SAME])
def test_both_names_mean_the_same_to_the_engine(given, expected):
    meant = {"max_tokens": 256, **(given if expected is None else expected)}
    assert OfflineParams(**given).to_sampling() == SamplingParams(**meant)


@pytest.mark.parametrize("row", PARAMETERS.values(), ids=lambda row: row.name)
def test_every_parameter_of_the_engine_can_be_given(row):
    for value in inside(row):
        needed = {"n": {"best_of": 16}, "min_tokens": {"max_tokens": 2**32 - 1}, "beam_width": {"best_of": 1}}
        own = SamplingParams(**{"max_tokens": 9, **needed.get(row.name, {}), row.name: value})
        listed = list(value) if isinstance(value, tuple) else value
        given = {**needed.get(row.name, {}), "max_tokens": own.max_tokens, row.name: listed}
        assert OfflineParams(**given).to_sampling() == own == OfflineParams.of(own).to_sampling()
    assert OfflineParams.of(SamplingParams()).to_sampling() == OfflineParams().to_sampling()


@pytest.mark.parametrize("row", PARAMETERS.values(), ids=lambda row: row.name)
def test_a_value_beyond_the_table_is_refused_by_name(row):
    name, otherwise = row.name, [("top_k", -1), ("seed", -1), ("best_of", None)]
    for value in [value for field, value in all_beyond() if field == name]:
        if row.most is not None or (name, value) in otherwise or (value is True and "logprobs" in name):
            continue  # what vLLM writes for none, or for 1; lists are checked with the model
        error = refusal(OfflineParams, **{name: value})
        assert error is not None and error.message.startswith((f"{name}.", f"{name}:")), value


def bad_beams(**given):
    return BeamSearchParams(**{"beam_width": 4, "max_tokens": 9, **given})


REGEX = Constraint(Shape.REGEX, "a")
REFUSED = [
    (OfflineParams, {"thinking_token_budget": 3, "thinking_budget": 3}, "thinking_token_budget: thinking_budget is"),
    (OfflineParams, {"thinking_token_budget": -1}, "thinking_budget: -1 is out of range"),
    (OfflineParams, {"n": 3, "best_of": 2}, "best_of: 2 is less than n"),
    (OfflineParams, {"min_tokens": 5, "max_tokens": 2}, "min_tokens: 5 exceeds max_tokens"),
    (OfflineParams, {"stop": "x", "detokenize": False}, "stop: stop strings are found in text"),
    (OfflineParams, {"detokenize": 1}, "detokenize: must be true or false"),
    (OfflineParams, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: must be a whole number"),
    (OfflineParams, {"bad_words": [""]}, "bad_words: entry 0"),
    (OfflineParams, {"structured_outputs": "json"}, "structured_outputs: must be StructuredOutputsParams"),
    (OfflineParams, {"output_kind": 3}, "output_kind: "),
    (OfflineParams, {"constraint": REGEX, "ignore_eos": True}, "ignore_eos: not allowed beside constraint"),
    (OfflineParams, {"constraint": REGEX, "beam_width": 2}, "constraint: not allowed beside beam_width"),
    (OfflineParams, {"guided_decoding": object()}, "guided_decoding=<object>: say what form outputs have"),
    (OfflineParams, {"logits_processors": [print]}, "logits_processors=<list>: no code of the caller"),
    (OfflineParams, {"stop_token_ids": "1,2"}, "stop_token_ids: must be a list"),
    (OfflineParams, {"stop": ["a", 7]}, "stop: entry 1 must be a string"),
    (OfflineParams, {"early_stopping": True}, "early_stopping=True: "),
    (OfflineParams, {"max_tokenz": 3}, r"SamplingParams has no option 'max_tokenz'; did you mean max_tokens\?"),
    (bad_beams, {"beam_width": 17}, "n: 17 is out of range"),
    (bad_beams, {"temperature": 0.7}, r"temperature=0\.7"),
    (bad_beams, {"beam_with": 4}, ".*did you mean beam_width"),
]


@pytest.mark.parametrize(("make", "given", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_a_bad_value_is_refused_when_the_parameters_are_made(make, given, message):
    """As wrong, as not there, or as misspelt."""
    name = next(iter(given))
    error = (
        Unimplemented if f"^{name}=" in f"^{message}" else TypeError if "did you mean" in message else InvalidArgument
    )
    with pytest.raises(error, match=f"^{message}") as caught:
        make(**given)
    assert error is not InvalidArgument or isinstance(caught.value, ValueError)


def test_a_misspelt_attribute_is_refused():
    with pytest.raises(AttributeError):
        OfflineParams().max_tokenz = 3


def test_a_beam_search_asks_for_all_its_beams():
    params = BeamSearchParams(beam_width=4, max_tokens=9, length_penalty=0.5).to_params()
    expected = SamplingParams(n=4, beam_width=4, max_tokens=9, length_penalty=0.5, logprobs=8)
    assert params.to_sampling() == expected
    greedy = SamplingParams(temperature=0.0, max_tokens=9, logprobs=2)
    assert BeamSearchParams(beam_width=1, max_tokens=9).to_params().to_sampling() == greedy


class Person:
    """A class of pydantic."""

    @classmethod
    def model_json_schema(cls) -> dict:
        return {"type": "integer"}


FORMS = [
    ({"json": {"type": "integer"}}, Constraint(Shape.JSON_SCHEMA, '{"type": "integer"}')),
    ({"json": Person}, Constraint(Shape.JSON_SCHEMA, '{"type": "integer"}')),
    ({"json": "{}"}, Constraint(Shape.JSON_SCHEMA, "{}")),
    ({"regex": "a+"}, Constraint(Shape.REGEX, "a+")),
    ({"choice": ["a", "b"]}, Constraint.choice(["a", "b"])),
    ({"grammar": "start: A"}, Constraint(Shape.LARK, "start: A")),
    ({"json_object": True}, Constraint(Shape.JSON_OBJECT)),
    ({"structural_tag": {"a": 1}}, Constraint(Shape.STRUCTURAL_TAG, '{"a": 1}')),
]


@pytest.mark.parametrize(("given", "constraint"), FORMS, ids=str)
def test_structured_outputs_are_a_constraint(given, constraint):
    params = OfflineParams(structured_outputs=StructuredOutputsParams(**given))
    assert params.to_sampling().constraint == constraint
    with pytest.raises(InvalidArgument, match="constraint is given, too"):
        OfflineParams(constraint=constraint, structured_outputs=StructuredOutputsParams(**given))


@pytest.mark.parametrize(
    "given", [{}, {"json": 3}, {"json": int}, {"choice": "ab"}, {"regex": "a", "json_object": True}], ids=str
)
def test_structured_outputs_have_one_form_of_the_right_type(given):
    with pytest.raises(InvalidArgument, match=r"^structured_outputs"):
        StructuredOutputsParams(**given)
