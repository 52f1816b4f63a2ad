"""Every client picks the same cell for a request, the cells get equal shares, and a further cell moves few requests."""

import json
import runpy
from collections import Counter

from octavo.request.ids import cell_number

IDS = [f"r-{number:032x}" for number in range(3000)]


def test_the_vectors_that_other_languages_use(root):
    path = root / "tests/golden/cells.json"
    script = runpy.run_path(str(root / "tests/golden/make_cells.py"))
    assert path.read_text(encoding="utf-8") == script["text"]()
    for vector in json.loads(path.read_text(encoding="utf-8"))["vectors"]:
        for num_cells, expected in vector["cells"].items():
            assert cell_number(vector["request_id"], int(num_cells)) == expected


def test_cells_get_equal_shares_and_a_further_one_moves_nothing_between_old_cells():
    before, after = ([cell_number(each, cells) for each in IDS] for cells in (5, 6))
    for found, count in ((before, 5), (after, 6)):
        shares = Counter(found)
        assert sorted(shares) == list(range(count))
        assert all(0.8 < share / (len(IDS) / count) < 1.2 for share in shares.values())
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {5}
