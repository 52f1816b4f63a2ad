"""Pictures over the three APIs for chats: one prompt, whichever asks; limits and refusals by the body's own fields."""

import asyncio
import random
import re
from functools import partial
from pathlib import Path

import pytest
from sighted import base64_of, data_url, file_of, give_template, sighted_runner
from web_pages import metrics

from octavo.net.security.authorizer import ONE_TENANT
from octavo.pictures.picture import parse_pictures
from octavo.request.errors import Unreachable
from router.streaming.prompts import picture_prompts
from router.streaming.prompts.picture_tally import REASONS, SOURCES

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
EVEN = {"temperature": 0, "ignore_eos": True}
ONE, OTHER = file_of(1), file_of(2, 150, 90)
HOST = "https://pictures.example.com"


@pytest.fixture
def templates(monkeypatch):
    give_template(monkeypatch)


async def start(world, workers=1, routers=1, **settings):
    await world.start([sighted_runner() for _ in range(workers)], routers, router=settings)


def picture_part(path, data):
    if path == CHAT:
        return {"type": "image_url", "image_url": {"url": data_url(data)}}
    return block(data) if path == MESSAGES else {"type": "input_image", "image_url": data_url(data), "detail": "auto"}


def block(data):
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(data)}}


def body_of(path, *parts, **more):
    """A body of one message with texts and pictures."""
    word = "input_text" if path == RESPONSES else "text"
    content = [{"type": word, "text": each} if isinstance(each, str) else picture_part(path, each) for each in parts]
    turns, most = ("input", "max_output_tokens") if path == RESPONSES else ("messages", "max_tokens")
    return {turns: [{"role": "user", "content": content}], most: 12, **EVEN, **more}


chat_body, responses_body, messages_body = (partial(body_of, path) for path in (CHAT, RESPONSES, MESSAGES))


def shown_in(world, request_id):
    """The prompt of a request, and the digests and places of its pictures."""
    record = world.entry(request_id).record
    return record.prompt_len, record.pictures


def text_of(path, answer):
    if path == CHAT:
        return answer["choices"][0]["message"]["content"]
    return (answer["output"][0] if path == RESPONSES else answer)["content"][0]["text"]


async def test_the_three_apis_show_the_same_prompt(world, call, templates):
    await start(world)
    found = {}
    for path in (CHAT, RESPONSES, MESSAGES):
        answer = (await call("POST", path, body_of(path, "which ", ONE, " or ", OTHER, "?"))).object
        found[path] = (*shown_in(world, answer["id"]), text_of(path, answer))
    assert len(set(found.values())) == 1, found
    [one, other] = parse_pictures(found[CHAT][1])
    assert (one.rows, one.columns, other.rows, other.columns) == (2, 4, 3, 5)
    counted = (await call("POST", f"{MESSAGES}/count_tokens", messages_body("which ", ONE, " or ", OTHER, "?"))).object
    assert counted["input_tokens"] == found[MESSAGES][0]
    different = (await call("POST", RESPONSES, responses_body("which ", OTHER, " or ", ONE, "?"))).object
    assert text_of(RESPONSES, different) != found[RESPONSES][2]
    assert not world.runners[0].mismatches, world.runners[0].first_mismatch


async def test_results_of_tools_show_pictures(world, call, templates):
    """In both APIs, as the same message of the role `tool`."""
    await start(world)
    said = messages_body("a cat", ONE)["messages"][0]["content"]
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": said}]},
    ]
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": responses_body("a cat", ONE)["input"][0]["content"]},
    ]
    message = (await call("POST", MESSAGES, {**messages_body(), "messages": turns})).object
    response = (await call("POST", RESPONSES, {**responses_body(), "input": items})).object
    assert shown_in(world, message["id"]) == shown_in(world, response["id"])
    assert shown_in(world, message["id"])[1]
    follow = responses_body("and now?", previous_response_id=response["id"])
    again = (await call("POST", RESPONSES, follow)).object
    assert shown_in(world, again["id"])[1] == shown_in(world, response["id"])[1]


async def test_a_conversation_goes_on_with_its_pictures(world, call, templates):
    """On any router; a client that sends all of it again has the same prompt. What came by a URL is not asked again."""
    await start(world, routers=2)
    first = (await call("POST", RESPONSES, responses_body("what? ", ONE))).object
    second = (
        await call("POST", RESPONSES, responses_body("and ", OTHER, previous_response_id=first["id"]), router=1)
    ).object
    third = (await call("POST", RESPONSES, responses_body("so?", previous_response_id=second["id"]))).object
    [seen, again] = parse_pictures(shown_in(world, third["id"])[1])
    [alone] = parse_pictures(shown_in(world, first["id"])[1])
    assert (seen, again.digest) == (alone, parse_pictures(shown_in(world, second["id"])[1])[1].digest)
    whole = [
        *responses_body("what? ", ONE)["input"],
        *first["output"],
        *responses_body("and ", OTHER)["input"],
        *second["output"],
        *responses_body("so?")["input"],
    ]
    sent = (await call("POST", RESPONSES, {**responses_body(), "input": whole})).object
    assert shown_in(world, sent["id"]) == shown_in(world, third["id"])
    assert text_of(RESPONSES, sent) == text_of(RESPONSES, third)
    [item] = (await call("GET", f"{RESPONSES}/{first['id']}/input_items", router=1)).object["data"]
    assert item["content"] == responses_body("what? ", ONE)["input"][0]["content"]


async def test_what_came_by_a_url_is_kept(world, call, templates, monkeypatch):
    """The host may show another picture since, or none: the conversation has the one that was there."""
    asked = []

    def fetch(url, field, hosts, most):
        asked.append(url)
        return ONE if len(asked) == 1 else OTHER

    monkeypatch.setattr(picture_prompts, "fetch_picture", fetch)
    await start(world, routers=2, picture_hosts=(HOST,))
    part = {"type": "input_image", "image_url": f"{HOST}/cat.png"}
    body = {**responses_body(), "input": [{"role": "user", "content": [part]}]}
    first = (await call("POST", RESPONSES, body)).object
    second = (await call("POST", RESPONSES, responses_body("so?", previous_response_id=first["id"]), router=1)).object
    assert shown_in(world, second["id"])[1] == shown_in(world, first["id"])[1] != ""
    assert len(asked) == 1
    [item] = (await call("GET", f"{RESPONSES}/{first['id']}/input_items")).object["data"]
    assert item["content"] == [{**part, "detail": "auto"}]
    image = {"type": "image", "source": {"type": "url", "url": f"{HOST}/cat.png"}}
    turns = [{"role": "user", "content": [image]}]
    message = (await call("POST", MESSAGES, {**messages_body(), "messages": turns})).object
    assert len(asked) == 2 and shown_in(world, message["id"])[1]


async def test_a_conversation_whose_pictures_are_too_large_to_keep_is_not_continued(
    world, call, templates, monkeypatch
):
    """The response itself is answered, and shown. It says that it cannot go on, and never goes on without them."""
    monkeypatch.setattr("router.http.responses.response_notes.MAX_NOTES_BYTES", 2000)
    await start(world)
    large = ONE + random.Random(0).randbytes(4000)  # what comes after the end of a PNG is not looked at
    first = await call("POST", RESPONSES, responses_body("what? ", large))
    assert first.status == 200
    refused = await call("POST", RESPONSES, responses_body("so?", previous_response_id=first.object["id"]))
    assert (refused.status, refused.error["param"]) == (400, "previous_response_id")
    assert "too large to be kept" in refused.error["message"]
    [item] = (await call("GET", f"{RESPONSES}/{first.object['id']}/input_items")).object["data"]
    assert item["content"][1] == {"type": "input_image", "image_url": None, "detail": "auto"}
    whole = (await call("GET", f"{RESPONSES}/{first.object['id']}")).object
    assert whole == first.object


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_refusals_name_the_fields_of_the_body(world, call, templates, path):
    await start(world, picture_count=2)
    field = {RESPONSES: "input[0].content[%d].image_url", MESSAGES: "messages[0].content[%d].source.data"}[path]

    async def refusal(*parts):
        answer = await call("POST", path, body_of(path, *parts))
        assert answer.status == 400, answer.body
        return answer.object["error"]["message"]

    for parts, place, what in (
        (("a", ONE[:60]), 1, "send the whole file"),
        (("a", b"<svg/>"), 1, "convert it"),
        ((ONE, "a", file_of(3, 5, 2000)), 2, "too oblong"),
        (("a", ONE, OTHER, ONE), 3, "3 pictures; at most 2"),
    ):
        said = await refusal(*parts)
        assert said.startswith(f"{field % place}: "), said
        assert what in said
    url = "https://elsewhere.example.com/a.png"
    if path == RESPONSES:
        body, field = responses_body(), "input[0].content[0].image_url"
        body["input"][0]["content"] = [{"type": "input_image", "image_url": url}]
    else:
        body, field = messages_body(), "messages[0].content[0].source.url"
        body["messages"][0]["content"] = [{"type": "image", "source": {"type": "url", "url": url}}]
    answer = await call("POST", path, body)
    assert answer.status == 400
    assert answer.object["error"]["message"].startswith(f"{field}: nothing is fetched from https://elsewhere")


async def test_a_named_prefix_moves_no_field(world, call, templates):
    """The system message that it adds is none of the body's."""
    await start(world)
    router = world.routers[0]
    [model] = router.models.list_models()
    made = await router.prefix_maker.make(model, ONE_TENANT, "sea", "Be brief", is_system=True, workers=1)
    await router.prefixes.add(made)
    assert (await call("POST", CHAT, chat_body("a", ONE, prefix="sea"))).status == 200
    refused = await call("POST", CHAT, chat_body("a", ONE[:60], prefix="sea"))
    assert refused.error["param"] == "messages[0].content[1].image_url"
    refused = await call("POST", MESSAGES, messages_body("a", ONE[:60], prefix="sea"))
    assert refused.object["error"]["message"].startswith("messages[0].content[1].source.data: ")


async def test_metrics_count_what_is_read_refused_and_encoded(world, call, templates, monkeypatch):
    def fetch(url, field, hosts, most):
        raise Unreachable("it is away: retry")

    monkeypatch.setattr(picture_prompts, "fetch_picture", fetch)
    await start(world, picture_count=2, picture_hosts=(HOST,))
    for parts in ((ONE,), (ONE, OTHER), (b"GIF",), (b"x", b"y", b"z")):
        await call("POST", MESSAGES, messages_body(*parts))
    for url in ("data:image/png,x", "https://elsewhere.example.com/a", f"{HOST}/a"):
        body = {**responses_body(), "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}
        await call("POST", RESPONSES, body)
    told = await metrics(world.routers[0].web_endpoint)
    assert [told[f"octavo_pictures_read_total{{source={each}}}"] for each in SOURCES] == [3, 0]
    refused = {each: told[f"octavo_pictures_refused_total{{reason={each}}}"] for each in REASONS}
    assert refused == {"model": 0, "count": 1, "host": 1, "fetch": 1, "data": 1, "file": 1, "template": 0}
    told = await metrics(world.workers[0].listener.web_endpoint)
    names = ("misses_total", "hits_total", "bytes", "encode_seconds_count")
    assert [told[f"octavo_picture_{name}"] for name in names] == [2, 1, 8 * (8 + 15), 2]


PAGE = Path(__file__).resolve().parents[3] / "docs/pictures.md"


async def test_the_example_of_the_page_runs_with_openais_own_package(world, templates, tmp_path, monkeypatch, capsys):
    await start(world)
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    code = code.replace("127.0.0.1:58051", world.routers[0].http_endpoint).replace("Qwen2.5-VL-3B-Instruct", "witness")
    (tmp_path / "cat.png").write_bytes(ONE)
    monkeypatch.chdir(tmp_path)
    found = {}
    await asyncio.to_thread(exec, compile(code, str(PAGE), "exec"), found)
    shown = [shown_in(world, found[name].id)[1] for name in ("first", "again")]
    assert shown[0] == shown[1] != ""
    found["client"].close()
    assert capsys.readouterr().out
