"""Web pages and a router's OpenAI port: none spends the machine or reads an answer, unless its origin is listed."""

from octavo.net.security.api_keys import line_of, new_key

PATH = "/v1/completions"
BODY = {"prompt": [4, 5, 6], "max_tokens": 3}
PAGE = "https://chat.example.com"


async def test_no_page_spends_the_machine(world, call, post):
    """Neither by what forms can send, nor under another name, nor by asking first."""
    for headers, status in [
        ({"content-type": "text/plain"}, 415),
        ({"origin": "http://evil.example"}, 403),
        ({"host": "evil.example"}, 421),
    ]:
        answer = await post(PATH, BODY, **headers)
        assert answer.status == status and answer.error["message"], headers
    asked = {"origin": "http://evil.example", "access_control_request_method": "POST"}
    assert (await call("OPTIONS", PATH, **asked)).status == 403
    assert world.routers[0]._opener.num_sessions == 0
    assert not world.entries, "a request was accepted"
    answer = await post(PATH, BODY)
    assert answer.status == 200 and "access-control-allow-origin" not in answer.headers


async def test_with_keys_a_listed_page_may_have_any_name(world, call, tmp_path):
    """Without the key a page gets nothing, so a proxy may leave Host as it is. A preflight needs no key."""
    key = new_key()
    (tmp_path / "keys").write_text(line_of("acme", key))
    await world.start(router={"api_keys": str(tmp_path / "keys"), "http_origins": ("https://Chat.example.com/",)})
    named = {"host": "llm.example.com"}
    assert (await call("POST", PATH, BODY, **named)).status == 401
    assert (await call("POST", PATH, BODY, authorization=f"Bearer {key}", **named)).status == 200
    assert (await call("POST", PATH, BODY, authorization=f"Bearer {key}", origin="http://a.b", **named)).status == 403
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    assert (await call("OPTIONS", PATH, origin=PAGE, **named, **asked)).status == 204
    for more, status in (({}, 200), ({"stream": True}, 200), ({"prompt": 7}, 400)):
        answer = await call("POST", PATH, BODY | more, authorization=f"Bearer {key}", origin=PAGE, **named)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, PAGE)
    refused = await call("POST", PATH, BODY, origin=PAGE, **named)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)
