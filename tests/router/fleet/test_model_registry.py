"""Which workers serve a model together, and which model a request belongs to."""

from types import SimpleNamespace

import pytest

from octavo.request.ids import Incarnation
from router.fleet.model_registry import ModelRegistry


@pytest.mark.parametrize(
    "different",
    [{"fingerprint": "others"}, {"layout": "fp8", "block_size": 32}, {"context_tokens": 50}, {"vocab_size": 300}],
    ids=lambda different: "-".join(different),
)
async def test_different_workers_may_follow_when_none_is_left(hello, different):
    models = ModelRegistry()
    assert await models.add_worker(hello("old")) == ""
    assert " differs from " in await models.add_worker(hello("new", **different))
    models.remove_worker(Incarnation("old"))
    assert await models.add_worker(hello("new", **different)) == ""
    model = models.find_by_name("name")
    assert model.workers == {"new"}
    for name, value in different.items():
        assert getattr(model, name) == value
    assert " differs from " in await models.add_worker(hello("old"))


async def test_a_request_belongs_to_its_layout_or_weights(hello):
    models = ModelRegistry()
    for name in ("bfloat16", "fp8"):
        await models.add_worker(hello(name, model=name, layout=name))

    def name_of(fingerprint: str, layout: str) -> str | None:
        model = models.find_for_record(SimpleNamespace(model=fingerprint, layout=layout))
        return model and model.name

    assert [name_of("weights", layout) for layout in ("bfloat16", "fp8")] == ["bfloat16", "fp8"]
    assert name_of("weights", "float32") in ("bfloat16", "fp8")
    assert name_of("others", "fp8") is None


async def test_a_model_named_as_an_alias_is_unused(hello):
    models = ModelRegistry({"chat": "name"})
    assert "--model-aliases gives to name: rename one" in await models.add_worker(hello("w", model="chat"))
    assert models.list_models() == []


async def test_a_given_tokenizer_replaces_that_of_workers(hello):
    given = SimpleNamespace(vocab_size=256)
    models = ModelRegistry(tokenizer=given)
    assert await models.add_worker(hello("w", tokenizer="/not/here")) == ""
    assert models.find_by_name(None).tokenizer is given


async def test_a_given_tokenizer_must_fit_the_model(hello):
    models = ModelRegistry(tokenizer=SimpleNamespace(vocab_size=257))
    assert "--tokenizer has 257 tokens, model name has 256" in await models.add_worker(hello("w"))
    assert models.list_models() == []
