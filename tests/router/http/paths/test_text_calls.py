"""/tokenize, /detokenize, /tokenizer_info and /version, against a router in this process."""

from importlib.metadata import version

from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer

HI = [{"role": "user", "content": "Hi"}]


async def test_a_prompt_becomes_tokens_and_text_again(world, templates, call, post):
    context = world.routers[0].models.list_models()[0].context_tokens
    found = (await post("/tokenize", {"prompt": "né", "return_token_strs": True})).object
    ids = [*"né".encode()]
    names = ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert found == {"count": 3, "max_model_len": context, "tokens": ids, "token_strs": names}
    assert (await post("/tokenize", {"prompt": "né"})).object["token_strs"] is None
    assert (await post("/detokenize", {"tokens": ids, "model": "fake"})).object == {"prompt": "né"}
    assert (await call("GET", "/version")).object == {"version": version("octavo")}
    assert (await post("/tokenize", {"messages": HI})).object["tokens"] == [*b"u:Hi\n"]


async def test_a_client_learns_how_chats_are_rendered(world, call, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "chat_template", "{{ messages }}")
    monkeypatch.setattr(ByteTokenizer, "template_variables", {"eos_token": "<end>", "now": "never"})
    await world.start()
    context = world.routers[0].models.list_models()[0].context_tokens
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    tokens = {"bos_token": None, "eos_token": "<end>", "pad_token": None, "unk_token": None}
    for path in ("/tokenizer_info", "/tokenizer_info?model=fake"):
        assert (await call("GET", path)).object == {**said, "chat_template": "{{ messages }}", **tokens}
    assert (await call("GET", "/tokenizer_info?model=none")).status == 404


async def test_what_is_wrong_is_named(post):
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"prompt": "x", "newer": 1}, "newer"),
        ("/tokenize", {"prompt": "x", "model": "none"}, "model"),
        ("/detokenize", {"tokens": [1, 2**32]}, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1], "newer": 1}, "newer"),
    ):
        answer = await post(path, body)
        assert (answer.status, answer.error["param"]) == (404 if param == "model" else 400, param)
