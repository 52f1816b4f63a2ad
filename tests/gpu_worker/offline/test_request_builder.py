"""What a caller of LLM gives: taken in many forms, or refused by the name of the place."""

import random
from dataclasses import replace

import pytest

from gpu_worker.offline.params import OfflineParams
from gpu_worker.offline.prompts import read_prompts
from gpu_worker.offline.request_builder import RequestBuilder
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class WithTemplate(ByteTokenizer):
    """Says who speaks."""

    def apply_chat(self, messages, *options):
        return self.encode("".join(f"{role}:{content}\n" for role, content in messages))


def make(tokenizer=None, seed=0) -> RequestBuilder:
    return RequestBuilder(FakeRunner(vocab_size=128).info, tokenizer or ByteTokenizer(), random.Random(seed))


@pytest.fixture
def builder() -> RequestBuilder:
    return make()


def test_parameters_are_for_all_or_one_for_each_and_seeds_are_drawn_in_order(builder):
    def read(params, field, of=builder):
        return [getattr(answer.params, field) for answer in of.from_prompts(read_prompts(["a", "b"]), params)]

    assert read(GREEDY, "temperature") == [0.0, 0.0]
    assert read([GREEDY, replace(GREEDY, max_tokens=3)], "max_tokens") == [8, 3]
    assert read(None, "max_tokens") == [256, 256]
    first, again, other = (read(None, "seed", make(seed=seed)) for seed in (1, 1, 2))
    assert first == again and len({*first, *other}) == 4
    assert read(SamplingParams(seed=7), "seed") == [7, 7]


OK = [{"role": "user", "content": "ok"}]
BAD = [  # prompts, parameters, and what is said
    (["ok", ""], GREEDY, r"prompts\[1\]: is empty"),
    (["ok", []], GREEDY, r"prompts\[1\]: the prompt is empty"),
    ([[1, 2], [3, 128]], GREEDY, r"prompts\[1\]: token id 128 at position 1"),
    ([[1, -1]], GREEDY, r"prompts\[0\]: token id -1"),
    (["\ud800"], GREEDY, r"prompts\[0\]: has no UTF-8"),
    (["ok", [1] * 8192], GREEDY, r"prompts\[1\]: a prompt of 8192"),
    (["x" * (16 * 8192 + 1)], GREEDY, r"prompts\[0\]: 131073 bytes"),
    (["a"], SamplingParams(temperature=float("nan")), r"sampling_params\.temperature: nan"),
    (["a", "b"], [GREEDY, replace(GREEDY, top_p=2.0)], r"sampling_params\[1\]\.top_p: 2"),
    (["a", "b"], [GREEDY], r"sampling_params: 1 for 2 prompts"),
    (["a", "b"], 7, "sampling_params: must be SamplingParams, or a list"),
    (["a", "b"], [GREEDY, {"n": 1}], r"sampling_params\[1\]: must be SamplingParams"),
]


@pytest.mark.parametrize(("prompts", "params", "message"), BAD, ids=[message for *_, message in BAD])
def test_a_bad_prompt_and_bad_parameters_are_named(builder, prompts, params, message):
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        builder.from_prompts(read_prompts(prompts), params)


@pytest.mark.parametrize(
    "conversation", [[{"role": "user"}], ["hi"], [{"role": "user", "content": 3}], [{"role": "", "content": "hi"}], []]
)
def test_a_bad_conversation_is_named(conversation):
    with pytest.raises(InvalidArgument, match=r"^messages\[1\](\[0\])?(\.content)?: "):
        make(WithTemplate()).from_conversations([OK, conversation], GREEDY)


class WithBeginning(ByteTokenizer):
    """Adds a beginning-of-sequence token."""

    def encode(self, text):
        return [1, *text.encode()]


def test_an_empty_text_is_a_prompt_where_the_tokenizer_adds_a_token(builder):
    for empty in ("", {"prompt": ""}):
        (answer,) = make(WithBeginning()).from_prompts(read_prompts(empty), GREEDY)
        assert answer.prompt_token_ids == [1]
        with pytest.raises(InvalidArgument, match=r"^prompts\[0\]: is empty; give some text, or at least one token id"):
            builder.from_prompts(read_prompts(empty), GREEDY)


def test_a_prompt_is_cut_to_its_last_tokens(builder):
    def ids(prompt, **params):
        return list(builder.from_prompts(read_prompts([prompt]), OfflineParams(**params))[0].prompt_token_ids)

    assert ids("abcdef", truncate_prompt_tokens=2) == list(b"ef")
    assert ids("abcdef", truncate_prompt_tokens=9) == list(b"abcdef")
    context = builder._info.context_tokens
    long = [number % 100 for number in range(context + 50)]
    assert ids(long, truncate_prompt_tokens=-1, max_tokens=30) == long[-(context - 30) :]


def test_a_bad_word_is_banned_alone_and_after_a_space(builder):
    (answer,) = builder.from_prompts(
        read_prompts("x"), OfflineParams(bad_words=["a", " bc"], banned_token_ids=[7], banned_sequences=[[1, 2]])
    )
    assert answer.params.banned_token_ids == (7, ord("a"))
    assert answer.params.banned_sequences == ((1, 2), tuple(b" a"), tuple(b"bc"), tuple(b" bc"))
    (answer,) = make(WithBeginning()).from_prompts(read_prompts("x"), OfflineParams(bad_words="ab"))
    assert answer.params.banned_sequences == (tuple(b"ab"), tuple(b" ab"))  # without the token that begins a prompt
    with pytest.raises(InvalidArgument, match=r"^sampling_params.bad_words: .* is 17 tokens of this model; at most 16"):
        builder.from_prompts(read_prompts("x"), OfflineParams(bad_words=["a" * 16]))
    with pytest.raises(InvalidArgument, match=r"^sampling_params\.banned_sequences: may leave no token"):
        builder.from_prompts(read_prompts("x"), OfflineParams(bad_words="bc", allowed_token_ids=[ord("c")]))


def test_messages_may_have_parts_and_pairs():
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
    for turn in ({"role": "user", "content": parts}, ("user", "hi\nyou")):
        (answer,) = make(WithTemplate()).from_conversations([turn], GREEDY)
        assert bytes(answer.prompt_token_ids) == b"user:hi\nyou\n"
