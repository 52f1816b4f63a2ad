"""What is sent: lengths, shared prefixes, turns, token ids, and the rows of a data set."""

import json
from itertools import islice

import pytest

from octavo.cli.bench.distributions import parse_lengths
from octavo.cli.bench.token_counter import TokenCounter
from octavo.cli.bench.traffic import WORDS, DatasetTraffic, SyntheticTraffic, read_dataset
from octavo.process.command_error import CommandError


def traffic(**more):
    return SyntheticTraffic(
        **{"seed": 1, "prompt_tokens": parse_lengths("20-30"), "output_tokens": parse_lengths("5"), **more}
    )


def prompts(source, side=0, number=0, count=20):
    return [each.next_request().prompt for each in islice(source.conversations(side, number), count)]


def test_prompts_differ_from_each_other_and_repeat_with_the_seed():
    found = prompts(traffic())
    assert len(set(found)) == 20
    assert all(20 <= len(prompt.split()) <= 30 for prompt in found)
    assert found == prompts(traffic()) != prompts(traffic(seed=2))
    assert not set(found) & set(prompts(traffic(), number=1))


def test_a_counter_makes_exact_lengths():
    def halves(text):
        return [half for word in text.split() for half in (word[:3], word[3:]) if half]  # long words are two tokens

    counter = TokenCounter(halves, 100)
    found = prompts(traffic(prompt_tokens=parse_lengths("100"), counter=counter), count=50)
    assert {counter.count(prompt) for prompt in found} <= {99, 100, 101}
    assert any(len(prompt.split()) < 90 for prompt in found)


def test_prefixes_are_shared_by_one_side_over_all_rounds():
    source = traffic(prefix_tokens=200, num_prefixes=3)

    def starts(side, number):
        return {" ".join(prompt.split()[:200]) for prompt in prompts(source, side, number, 40)}

    assert len(starts(0, 0)) == 3
    assert starts(0, 0) == starts(0, 1)
    assert not starts(0, 0) & starts(1, 0)


def test_token_ids_are_below_the_vocabulary():
    found = prompts(traffic(vocab_size=50, prefix_tokens=8))
    assert all(28 <= len(ids) <= 38 and set(ids) <= set(range(50)) for ids in found)
    assert len({tuple(ids[:8]) for ids in found}) == 1


def test_a_chat_has_its_history_as_messages():
    source = traffic(chat=True, num_turns=2, prefix_tokens=4, think_time_s=2.0)
    conversation = next(source.conversations(0, 0))
    assert [message["role"] for message in conversation.next_request().prompt] == ["system", "user"]
    conversation.answers.append("yes")
    messages = conversation.next_request().prompt
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "yes"
    assert conversation.turns[0].pause_s == 0.0 < conversation.turns[1].pause_s


def test_the_words_are_words():
    assert len(set(WORDS)) == len(WORDS) > 100
    assert all(word.isalpha() and word.islower() for word in WORDS)


def written(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def test_rows_of_a_data_set_come_in_order_and_then_again(tmp_path):
    path = written(tmp_path, {"prompt": "one"}, {"prompt": [1, 2], "max_tokens": 3}, {"turns": ["a", "b"]})
    rows = read_dataset(path, chat=False)
    source = DatasetTraffic(0, rows, parse_lengths("9"), rows_per_round=2)
    requests = [each.next_request() for each in islice(source.conversations(0, 1), 3)]
    assert [request.prompt for request in requests] == ["a", "one", [1, 2]]
    assert [request.max_tokens for request in requests] == [9, 9, 3]
    assert prompts(source, side=1, count=3) == prompts(source, side=0, count=3)


def test_messages_of_a_data_set_go_as_they_are(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = read_dataset(written(tmp_path, {"messages": messages}), chat=True)
    source = DatasetTraffic(0, rows, parse_lengths("9"), 1, chat=True)
    assert prompts(source, count=1) == [messages]


@pytest.mark.parametrize(
    ("row", "chat", "says"),
    [
        ("{", False, "is no JSON"),
        ("[]", False, "none or several of prompt"),
        ({"prompt": "a", "turns": ["b"]}, False, "none or several of prompt"),
        ({"text": "a"}, False, "none or several of prompt"),
        ({"prompt": ""}, False, "a text or a list of token ids"),
        ({"prompt": [1, -2]}, False, "a text or a list of token ids"),
        ({"prompt": [1]}, True, "leave out --chat"),
        ({"messages": [{"role": "user", "content": "a"}]}, False, "add --chat"),
        ({"messages": [{"content": "a"}]}, True, "messages[0]"),
        ({"turns": []}, False, "list of texts"),
        ({"prompt": "a", "max_tokens": "many"}, False, "max_tokens"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, row, chat, says):
    path = written(tmp_path, {"turns": ["fine"]}, row)
    with pytest.raises(CommandError) as caught:
        read_dataset(path, chat)
    assert "line 2 of" in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_data_set_that_is_none_is_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path, says in (
        (str(tmp_path / "none"), "No such file"),
        (str(tmp_path / "bytes"), "UTF-8"),
        (written(tmp_path), "no rows"),
    ):
        with pytest.raises(CommandError, match=says):
            read_dataset(path, chat=False)
