"""Which workers serve a model together, and which model a request belongs to."""

from types import SimpleNamespace

from router.fleet.model_registry import ModelRegistry


async def test_what_contradicts_the_settings_is_unused(hello):
    models = ModelRegistry({"chat": "name"})
    assert "--model-aliases gives to name: rename one" in await models.add_worker(hello("w", model="chat"))
    assert models.list_models() == []
    models = ModelRegistry(tokenizer=SimpleNamespace(vocab_size=257))
    assert "--tokenizer has 257 tokens, model name has 256" in await models.add_worker(hello("w"))
    assert models.list_models() == []
    models = ModelRegistry(tokenizer=SimpleNamespace(vocab_size=256))  # it replaces that of workers
    assert await models.add_worker(hello("w", tokenizer="/not/here")) == ""
    assert models.find_by_name(None).tokenizer.vocab_size == 256
