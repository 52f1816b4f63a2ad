"""The forms of a prompt: each is read for what it is, and what is no prompt is refused by its place."""

import pytest

from gpu_worker.offline.prompts import OfflinePrompt, read_prompts
from octavo.request.errors import InvalidArgument, Unimplemented

FORMS = [  # what is given, and of each prompt: the text, and what follows it
    ("abc", [("abc",)]),
    ("", [("",)]),
    ([1, 2], [(None, [1, 2])]),
    ({"prompt_token_ids": (1, 2), "prompt": "ab"}, [("ab", [1, 2])]),
    ({"prompt": "abc", "cache_salt": "s"}, [("abc", None, "s")]),
    ({"prompt": "abc", "multi_modal_data": None}, [("abc",)]),
    ([[1], [2]], [(None, [1]), (None, [2])]),
    ([{"prompt": "a"}, {"prompt_token_ids": [2]}, "c", [4]], [("a",), (None, [2]), ("c",), (None, [4])]),
    ([], []),
    ([""], [("",)]),
]


@pytest.mark.parametrize(("given", "expected"), FORMS, ids=[repr(given) for given, _ in FORMS])
def test_a_prompt_is_read_for_what_it_is(given, expected):
    assert read_prompts(given) == [OfflinePrompt(f"prompts[{i}]", *prompt) for i, prompt in enumerate(expected)]


def test_token_ids_may_come_apart():
    named = [OfflinePrompt("prompt_token_ids[0]", None, [1, 2]), OfflinePrompt("prompt_token_ids[1]", None, [3])]
    assert read_prompts(None, [[1, 2], [3]]) == named
    assert read_prompts(None, [1, 2]) == named[:1]
    for text, ids in (("ab", [1, 2]), (["ab"], [[1, 2]])):
        assert read_prompts(text, ids) == [OfflinePrompt("prompt_token_ids[0]", "ab", [1, 2])]


REFUSED = [
    ((None,), r"prompts: is missing"),
    ((3,), r"prompts: a int is no prompt"),
    ((["ok", 3],), r"prompts\[1\]: a int is neither text nor a list of token ids; give"),
    (({},), r"prompts\[0\]: has neither prompt nor prompt_token_ids"),
    (({"promt": "abc"},), r"prompts\[0\]: has no key 'promt'; did you mean prompt\?"),
    (({"prompt": [1]},), r"prompts\[0\]\.prompt: a list is no text"),
    (({"prompt_token_ids": "abc"},), r"prompts\[0\]\.prompt_token_ids: a str"),
    (({"prompt_token_ids": [1.5]},), r"prompts\[0\]\.prompt_token_ids: a list"),
    (({"prompt": "abc", "cache_salt": 3},), r"prompts\[0\]\.cache_salt: must be ASCII"),
    ((["a", "b"], [[1]]), r"prompt_token_ids: 1 prompts, but prompts has 2"),
    (([{"prompt": "a"}], [[1]]), r"prompts: beside prompt_token_ids"),
    ((None, False), r"prompt_token_ids: a bool is no list of token ids"),
    ((None, "abc"), r"prompt_token_ids: a str is no list of token ids"),
    ((None, [[1], "a"]), r"prompt_token_ids\[1\]: a str"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_no_prompt_is_refused_by_its_place(given, message):
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        read_prompts(*given)


@pytest.mark.parametrize("key", ["multi_modal_data", "prompt_embeds", "encoder_prompt"])
def test_a_key_that_octavo_does_not_have_is_refused_by_its_name(key):
    with pytest.raises(Unimplemented, match=f"^{key}=.*give prompt"):
        read_prompts({"prompt": "abc", key: [1]})
