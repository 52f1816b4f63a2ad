"""docs/protocol-reference.md and docs/sampling.md say what the code does: limits, parameters, hashes, the token."""

import hashlib
import re
import runpy

import pytest

from octavo.request import limits
from octavo.store.base import Store
from router.streaming import resume_tokens


@pytest.fixture(scope="module")
def text(root):
    return (root / "docs/protocol-reference.md").read_text(encoding="utf-8")


def test_the_limits_are_those_of_the_code(text):
    written = text.split("<!-- limits -->\n")[1].split("\n<!-- end of limits -->")[0]
    told = [
        "MESSAGE_BYTES", "INTERNAL_MESSAGE_BYTES", "METADATA_BYTES", "REQUEST_ID_CHARS",
        "TEXT_BYTES_PER_CONTEXT_TOKEN", "CHAT_MESSAGES", "ROLE_BYTES", "BATCH_ITEMS", "SALT_BYTES", "DEADLINE_MS",
    ]  # fmt: skip
    numbers = [re.search(r"(?:at most|1 to) (\d+)", row)[1] for row in written.splitlines()[2:]]
    assert numbers == [str(getattr(limits, f"MAX_{name}")) for name in told]


def test_the_parameters_are_those_of_the_code(root):
    """`make generate` writes the page."""
    page = runpy.run_path(str(root / "tools/sampling_docs.py"))["page"]
    assert (root / "docs/sampling.md").read_text(encoding="utf-8") == page()


def test_the_resume_token_is_as_written(text, root, monkeypatch):
    """Makes a token from the words of the text alone and compares it with the router's."""
    section = text.split("<!-- resume token")[1].split("<!-- end of resume token")[0]
    owner = re.match(r": owned by (\S+); change both together", section)
    assert owner
    assert (root / owner[1]).is_file()
    assert "token = body ‖ BLAKE2b-128(key = key, u16(number of bytes of tenant) ‖ tenant ‖ body)" in section
    assert "body  = u8(version = 3) ‖ key id ‖ u64(generation) ‖ u32(seconds since 1970) ‖ u8(number" in section
    assert "u8(number of bytes of request_id) ‖ u8(number of returned branches) ‖ request_id ‖ place" in section
    assert "the key id its BLAKE2b-32 with the person octavo.keyid.v1" in " ".join(section.split())
    assert "place = u32(next index) ‖ u64(chain there) ‖ u32(bytes of text delivered)" in section
    key, places = bytes(range(32)), [(7, 2**64 - 2, 300), (0, 5, 0)]
    body = bytes([3]) + hashlib.blake2b(key, digest_size=4, person=b"octavo.keyid.v1").digest()
    body += (2**40 + 1).to_bytes(8, "little") + (2**31).to_bytes(4, "little") + bytes([3, 2]) + b"r-1"
    for index, chain, text_bytes in places:
        body += index.to_bytes(4, "little") + chain.to_bytes(8, "little") + text_bytes.to_bytes(4, "little")
    token = body + hashlib.blake2b(b"\x04\0acme" + body, key=key, digest_size=16).digest()
    monkeypatch.setattr(resume_tokens.time, "time", lambda: 2**31 + 0.5)
    assert resume_tokens.ResumeTokens(key, 2**40 + 1).make_token(b"r-1", places, "acme") == token


def test_every_function_of_the_store_is_explained(text):
    section = text.split("\n## The store's functions\n")[1].split("\n## ")[0]
    functions = {name for name in vars(Store) if not name.startswith("_")} - {"generation", "open", "close"}
    assert len(functions) > 15
    assert not {name for name in functions if f"`{name}(" not in section}
