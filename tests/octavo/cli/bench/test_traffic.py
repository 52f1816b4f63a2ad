"""What is sent: lengths, shared prefixes, turns, token ids, and the rows of a data set."""

import json
from itertools import islice

import pytest

from octavo.cli.bench.dataset import read_dataset
from octavo.cli.bench.lengths import parse_lengths
from octavo.cli.bench.traffic import DatasetTraffic, SyntheticTraffic
from octavo.process.command_error import CommandError


def traffic(**more):
    return SyntheticTraffic(
        **{"seed": 1, "prompt_tokens": parse_lengths("20-30"), "output_tokens": parse_lengths("5"), **more}
    )


def prompts(source, side=0, number=0, count=20):
    return [each.next_request().prompt for each in islice(source.conversations(side, number), count)]


def written(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def test_rows_of_a_data_set_come_in_turns(tmp_path):
    path = written(tmp_path, {"prompt": "one"}, {"prompt": [1, 2], "max_tokens": 3}, {"turns": ["a", "b"]})
    rows = read_dataset(path, chat=False)
    source = DatasetTraffic(0, rows, parse_lengths("9"), rows_per_round=2)
    requests = [each.next_request() for each in islice(source.conversations(0, 1), 3)]
    assert [request.prompt for request in requests] == ["a", "one", [1, 2]]
    assert [request.max_tokens for request in requests] == [9, 9, 3]
    assert prompts(source, side=1, count=3) == prompts(source, side=0, count=3)


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
