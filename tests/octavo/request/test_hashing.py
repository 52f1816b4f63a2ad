"""The hashes are those of the specification, and nothing that should tell two blocks apart is lost."""

import json
import runpy

from hypothesis import given
from hypothesis import strategies as st

from octavo.request import hashing

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)
texts = st.text(max_size=8)
ROOT = bytes(32)


def test_golden_vectors(root):
    text = (root / "tests/golden/hashes.json").read_text(encoding="utf-8")
    assert text == runpy.run_path(str(root / "tests/golden/make_hashes.py"))["text"]()
    golden = json.loads(text)
    for vector in golden["root_key"]:
        expected = vector.pop("root")
        assert hashing.root_key(**vector).hex() == expected
    for vector in golden["block_hash"]:
        got = hashing.block_hash(bytes.fromhex(vector["root"]), bytes.fromhex(vector["parent"]), vector["token_ids"])
        assert got.hex() == vector["hash"]
    for vector in golden["block_hashes"]:
        got = hashing.block_hashes(bytes.fromhex(vector["root"]), vector["token_ids"], vector["block_size"])
        assert [block.hex() for block in got] == vector["hashes"]
    for vector in golden["extend_chain"]:
        assert hashing.extend_chain(int(vector["chain"], 16), vector["token_ids"]) == int(vector["after"], 16)
    for vector in golden["prompt_chain"]:
        assert hashing.prompt_chain(vector["token_ids"]) == int(vector["chain"], 16)
    assert sum(map(len, golden.values())) >= 20


@given(first=st.tuples(texts, texts, texts, texts), second=st.tuples(texts, texts, texts, texts))
def test_different_identities_have_different_roots(first, second):
    """Also where the parts run together: ("ab", "c") is not ("a", "bc")."""
    assert (hashing.root_key(*first) == hashing.root_key(*second)) == (first == second)


@given(ids=token_ids, size=st.sampled_from([1, 2, 8, 16]))
def test_hashes_cover_full_blocks_and_each_all_before_it(ids, size):
    hashes = hashing.block_hashes(ROOT, ids, size)
    assert len(hashes) == len(ids) // size
    for i in range(len(hashes)):
        assert hashing.block_hashes(ROOT, ids[: (i + 1) * size], size) == hashes[: i + 1]
    changed = [ids[0] ^ 1, *ids[1:]] if ids else []
    assert not set(hashes) & set(hashing.block_hashes(ROOT, changed, size))


@given(chain=st.integers(0, 2**64 - 1), ids=token_ids, cut=st.integers(0, 40))
def test_a_chain_does_not_depend_on_how_tokens_were_chunked(chain, ids, cut):
    whole = hashing.extend_chain(chain, ids)
    assert hashing.extend_chain(hashing.extend_chain(chain, ids[:cut]), ids[cut:]) == whole
    assert 0 <= whole < 2**64


@given(chain=st.integers(0, 2**64 - 1), ids=token_ids.filter(bool), position=st.integers(0, 39))
def test_a_chain_tells_histories_apart(chain, ids, position):
    position %= len(ids)
    other = [*ids[:position], ids[position] ^ 1, *ids[position + 1 :]]
    assert hashing.extend_chain(chain, ids) != hashing.extend_chain(chain, other)
    assert hashing.prompt_chain(ids) != hashing.prompt_chain(other)
