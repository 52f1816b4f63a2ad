"""Fields that no reader takes: accepted and named in a header where they change nothing, else refused."""

import pytest

from octavo.request.errors import InvalidArgument
from router.http.bodies.chat_body import read_chat
from router.http.bodies.completion_body import read_completion
from router.http.bodies.unknown_fields import ANY, HARMLESS, INSTEAD, WARN, ClientBody

PATH = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 2}
HEADER = "x-octavo-ignored-fields"
BASES = [(read_completion, {"prompt": "x"}), (read_chat, {"messages": [{"role": "user", "content": "x"}]})]


@pytest.mark.parametrize(("read", "base"), BASES)
def test_harmless_fields_are_read_by_nobody_and_named(read, base):
    """With each of the values by which they are harmless, and with no other."""
    fields = {name: {"any": [1]} if values is ANY else values[0] for name, values in HARMLESS.items()}
    body = ClientBody({**base, **fields})
    plain = read(base).request
    asked = read(body).request
    asked.request_id = plain.request_id
    assert asked == plain
    assert sorted(body.ignored) == sorted(HARMLESS)
    for name in [name for name, values in HARMLESS.items() if values is not ANY]:
        for value in (0.5, "x", [], {}):
            with pytest.raises(InvalidArgument, match=f"^{name}: is not supported"):
                read(ClientBody({**base, name: value}))


@pytest.mark.parametrize(("name", "instead"), INSTEAD.items())
def test_what_others_call_otherwise_is_refused_with_its_name_here(name, instead):
    with pytest.raises(InvalidArgument, match=f"^{name}: is not supported; say {instead}$"):
        read_completion(ClientBody({"prompt": "x", name: "y"}))
    if instead != "response_format":
        head, _, field = instead.partition(",")[0].partition(".")
        value = {"choice": ["a"], "json": {}, "regex": "a", "grammar": 'start: "a"'}.get(field, 1)
        read_completion(ClientBody({"prompt": "x", head: {field: value} if field else value}))


@pytest.mark.parametrize(("read", "base"), BASES)
def test_with_warn_all_are_accepted_but_none_inside_others(read, base):
    body = ClientBody({**base, **{f"new {i}\r\né,": i for i in range(100)}}, WARN)
    read(body)
    assert len(body.ignored) == 100
    assert all(name.isascii() and name.isprintable() and "," not in name for name in body.ignored)
    with pytest.raises(InvalidArgument, match=r"^stream_options.newer: is not supported"):
        read(ClientBody({**base, "stream": True, "stream_options": {"newer": 1}}, WARN))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_names_them(stream, post):
    answer = await post(PATH, {**BODY, "user": "u", "cache_prompt": True, "stream": stream})
    assert (answer.status, answer.headers[HEADER]) == (200, "user, cache_prompt")
    assert HEADER not in (await post(PATH, {**BODY, "stream": stream})).headers
    refused = await post(PATH, {**BODY, "guided_json": {}})
    assert (refused.status, refused.error["param"]) == (400, "guided_json")


async def test_a_router_may_warn_of_all(world, call, templates):
    await world.start(router={"http_unknown_fields": "warn"})
    answer = await call("POST", PATH, {**BODY, **{f"f{i}": i for i in range(70)}})
    assert answer.status == 200
    assert answer.headers[HEADER].startswith("f0, f1, ")
    assert answer.headers[HEADER].endswith("f63, (and-6-more)")
    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/rerank", {"query": "q", "documents": ["a"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"max_output_tokens": 2, "input": "Hi"}),
    ):
        answer = await call("POST", path, body | {"nobody_knows": 1})
        assert (answer.status, answer.headers.get(HEADER)) == (200, "nobody_knows"), path
