"""POST /v1/completions, against routers and workers in this process."""

from octavo.request.sampling import SamplingParams

PROMPT = list(range(3, 40))
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40}
PATH = "/v1/completions"


def texts(chunks):
    """The text of each choice that the chunks of a stream have."""
    found = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


async def test_an_answer_is_what_grpc_answers_whole_and_in_chunks(world, oracle, post):
    answer = await post(PATH, {**GREEDY, "return_token_ids": True})
    ((tokens, text, _),) = oracle.outputs(PROMPT, SamplingParams(temperature=0.0, max_tokens=40))
    assert answer.status == 200
    found = answer.object
    assert found["object"] == "text_completion"
    assert found["id"] == answer.headers["x-request-id"] and found["id"].startswith("cmpl-")
    (model,) = world.routers[0].models.list_models()
    assert found["system_fingerprint"] == model.fingerprint
    shown = {"prompt_token_ids": PROMPT, "token_ids": list(tokens)}
    assert found["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length", **shown}]
    counted = {"prompt_tokens": len(PROMPT), "completion_tokens": 40, "total_tokens": len(PROMPT) + 40}
    assert found["usage"] == {**counted, "prompt_tokens_details": {"cached_tokens": 0}}
    answer = await post(PATH, {**GREEDY, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, last = answer.chunks
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert texts(chunks) == {0: text}
    assert {chunk["id"] for chunk in chunks} == {answer.headers["x-request-id"]}
    assert {chunk["system_fingerprint"] for chunk in chunks} == {model.fingerprint}
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 40)
    plain = await post(PATH, {**GREEDY, "stream": True})
    assert all("usage" not in chunk for chunk in plain.chunks)


async def test_branches_seeds_and_stops_are_those_of_grpc(oracle, post):
    for more in ({"n": 3}, {"n": 2, "best_of": 4}, {"n": 1, "stop": ["e", "zz"]}):
        params = SamplingParams(seed=7, max_tokens=30, **{k: tuple(v) if k == "stop" else v for k, v in more.items()})
        expected = {i: text for i, (_, text, _) in enumerate(oracle.outputs(PROMPT, params))}
        body = {"prompt": PROMPT, "seed": 7, "max_tokens": 30, **more}
        assert texts((await post(PATH, {**body, "stream": True})).chunks) == expected
        assert texts([(await post(PATH, body)).object]) == expected


async def test_a_text_prompt_is_echoed(post):
    asked = {"prompt": ["Once é"], "temperature": 0, "max_tokens": 8}
    answer = (await post(PATH, asked)).object
    echoed = (await post(PATH, {**asked, "echo": True})).object
    assert echoed["choices"][0]["text"] == "Once é" + answer["choices"][0]["text"]
    streamed = await post(PATH, {**asked, "echo": True, "stream": True})
    assert texts(streamed.chunks) == {0: echoed["choices"][0]["text"]}
    cut = (await post(PATH, {"prompt": "abcdef", "echo": True, "truncate_prompt_tokens": 2})).object
    assert cut["choices"][0]["text"].startswith("ef")


async def test_log_probabilities_have_the_shape_of_completions(post):
    """Also what evaluation harnesses ask for: echo, log probabilities, and no new token."""
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 0, "logprobs": 2, "echo": True}
    found = (await post(PATH, body)).object
    (choice,) = found["choices"]
    assert (choice["text"], found["usage"]["completion_tokens"]) == ("Once", 0)
    scores = choice["logprobs"]
    assert (scores["tokens"], scores["text_offset"]) == (list("Once"), [0, 1, 2, 3])
    assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
    (chunk,) = (await post(PATH, {**body, "stream": True})).chunks
    assert chunk["choices"][0]["logprobs"] == scores
    for stream in (False, True):
        answer = await post(PATH, {**body, "max_tokens": 6, "stream": stream})
        shown = [each["choices"][0]["logprobs"] for each in (answer.chunks if stream else [answer.object])]
        joined = {name: [value for part in shown if part for value in part[name]] for name in scores}
        assert {name: len(values) for name, values in joined.items()} == dict.fromkeys(scores, 10)
        assert joined["text_offset"] == sorted(joined["text_offset"])
        assert joined["token_logprobs"][:4] == scores["token_logprobs"]
        names, logprobs, tops = (joined[name][1:] for name in ("tokens", "token_logprobs", "top_logprobs"))
        for name, logprob, top in zip(names, logprobs, tops, strict=True):
            assert top[name] == logprob <= 0 and 2 <= len(top) <= 3


WRONG = [
    ({"max_tokens": 0}, "max_tokens", "out of range"),
    ({"seed": 1.5}, "seed", "a whole number, -9223372036854775808 to 18446744073709551615"),
    ({"stop": 5}, "stop", "string"),
    ({"logit_bias": {"x": 1, "7": 1, "y": 1}}, "logit_bias", "token id, unlike 'x', 'y'"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "beside stream"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"stream": True, "stream_options": {"newer": 1}}, "stream_options.newer", "not supported"),
    ({"prompt": None}, "prompt", "must be"),
    ({"prompt": ["a"] * 65}, "prompt", "65 prompts"),
    ({"prompt": ["a", 7]}, "prompt[1]", "must be a string"),
    ({"prompt": ["a", [1, -1]]}, "prompt[1]", "position 1"),
    ({"prompt": [1, 10**6]}, "prompt", "position 1"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": "\ud800"}, "prompt", "UTF-8"),
    ({"request_id": ""}, "request_id", "printable"),
    ({"request_id": "é"}, "request_id", "printable"),
    ({"priority": "urgent"}, "priority", "bulk"),
]


async def test_a_wrong_field_is_named(post):
    for more, param, word in WRONG:
        answer = await post(PATH, {**GREEDY, **more})
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), more
        assert answer.error["param"] == param
        assert word in answer.error["message"]
        assert "sampling." not in answer.error["message"]


async def test_what_is_no_object_is_refused(post):
    for body in (b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"):
        answer = await post(PATH, body)
        assert (answer.status, answer.error["param"] in ("body", "n")) == (400, True), body[:20]


async def test_large_bodies_are_refused_unread(world, connect):
    await world.start()
    for header in (f"content-length: {5 * 2**20}", "transfer-encoding: chunked"):
        connection = await connect()
        head = f"host: localhost\r\n{header}\r\ncontent-type: application/json\r\n\r\n"
        connection.writer.write(f"POST {PATH} HTTP/1.1\r\n{head}".encode())
        if "chunked" in header:
            for _ in range(72):
                connection.writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
        answer = await connection.answer()
        assert answer.status == 413
        assert "4194304 bytes" in answer.error["message"]


async def test_statuses_say_whether_and_when_to_come_back(world, call, connect):
    router = await world.router(max_queued_requests=1)
    away = await call("POST", PATH, GREEDY)
    assert (away.status, away.error["type"]) == (503, "server_error")
    assert int(away.headers["retry-after"]) >= 1
    assert int(away.headers["retry-after-ms"]) == 3000  # OpenAI's clients try twice more
    await world.worker()
    await world.ready()
    late = await call("POST", PATH, GREEDY, x_request_timeout_ms="0.001")
    assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
    wrong = await call("POST", PATH, GREEDY, x_request_timeout_ms="soon")
    assert (wrong.status, wrong.error["param"]) == (400, "x-request-timeout-ms")
    router.dispatcher._room_left = lambda model: 0
    (await connect()).send("POST", PATH, GREEDY)
    await world.until(lambda: len(world.state.queue) == 1)
    full = await call("POST", PATH, GREEDY)
    assert (full.status, full.error["type"], full.error["code"]) == (429, "rate_limit_error", "queue_full")
    assert int(full.headers["retry-after"]) >= 1


async def test_silence_is_filled_with_comments(world, connect, monkeypatch):
    monkeypatch.setattr("router.http.reply.PING_S", 0.05)
    await world.start(step_s=0.2)
    connection = await connect()
    connection.send("POST", PATH, {**GREEDY, "max_tokens": 3, "stream": True})
    answer = await connection.answer()
    assert b"\n\n: the request waits\n\n" in b"\n\n" + answer.body
    assert len(texts(answer.chunks)) == 1
