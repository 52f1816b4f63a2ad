"""Log probabilities that died with their worker: the answer is no answer, and a client asks again."""

import pytest

from router.http import answers


@pytest.fixture
def lost(monkeypatch):
    """What each whole answer has lost: names of fields."""
    names: list[str] = []
    whole_answer = answers.whole_answer

    async def without(session):
        answer = await whole_answer(session)
        if "prompt_logprobs" in names:
            del answer.prompt_logprobs[1:]
        for output in answer.outputs if "logprobs" in names else ():
            output.ClearField("logprobs")
        return answer

    monkeypatch.setattr(answers, "whole_answer", without)
    return names


async def test_an_answer_without_them_is_an_error_that_clients_repeat(lost, post):
    for number, (asked, name) in enumerate(
        (
            ({"logprobs": 1}, "logprobs"),
            ({"prompt_logprobs": 1}, "prompt_logprobs"),
            ({"logprobs": 1, "echo": True, "max_tokens": 1}, "prompt_logprobs"),
            ({"logprobs": 1, "echo": True, "max_tokens": 0}, "prompt_logprobs"),
        )
    ):
        body = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 3, **asked}
        lost.clear()
        assert (await post("/v1/completions", body)).status == 200
        lost.append(name)
        answer = await post("/v1/completions", body)
        assert (answer.status, answer.error["code"]) == (503, "unreachable")
        # One that the client has named it may fetch as often as it likes, as far as it goes.
        assert (await post("/v1/completions", {**body, "request_id": f"mine-{number}"})).status == 200
        assert (await post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 3})).status == 200
