"""The file of API keys: what stands in it counts, and what cannot be read is named by its line and never shown."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.security import api_keys
from octavo.security.api_keys import ApiKeyError, ApiKeys, line_of, new_key

KEY = "octavo-" + "fixed" * 8  # no new one: parallel processes must name tests alike
DIGEST = line_of("acme", KEY).partition(":")[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("acme", "TENANT:SHA256"),
        ("acme:12", "64 hex digits"),
        (f"acme:{'g' * 64}", "64 hex digits"),
        (f"acme:{DIGEST} # of Ann", "64 hex digits"),
        (f"acme:{DIGEST}{DIGEST}", "64 hex digits"),
        (f"acme:{DIGEST[:-1]}é", "64 hex digits"),
        (f"a b:{DIGEST}", "a tenant's name"),
        (f":{DIGEST}", "a tenant's name"),
        (f"{'a' * 65}:{DIGEST}", "a tenant's name"),
        (f"bolt:{DIGEST}", "the key of line 2, which is another tenant's"),
        (f"ac\u2028me:{DIGEST}", "a tenant's name"),  # a line of one editor is one line here
        (KEY, "TENANT:SHA256"),  # the key itself, by mistake
    ],
)
def test_a_line_that_cannot_be_read_is_named_and_not_shown(file: Path, line: str, says: str) -> None:
    file.write_text(f"# fine\n{line_of('acme', KEY)}\n\n{line}\n")
    with pytest.raises(ApiKeyError, match=rf"^--api-keys .*keys, line 4: .*{says}") as refused:
        ApiKeys(str(file))
    assert line not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "says"), [(None, "No such file"), (b"acme:\xff", "UTF-8"), ("acme:12".encode("utf-16"), "UTF-8")]
)
def test_a_file_that_cannot_be_read_is_named(file: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ApiKeyError, match=f"^--api-keys .*keys: .*{says}"):
        ApiKeys(str(file))


@given(
    content=st.binary(max_size=200)
    | st.text().map(lambda text: f"{text}:{DIGEST}".encode("utf-8", "replace"))
    | st.text("ab:0\n\r\f\x1e\u2028# ", max_size=40).map(str.encode)
)
def test_any_file_is_taken_or_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "drawn-keys"
    file.write_bytes(content)
    said = ""
    try:
        ApiKeys(str(file)).tenant_of(KEY)
    except ApiKeyError as error:
        said = str(error)
    assert not said or said.startswith(f"--api-keys {file}")


def test_a_file_may_be_written_by_another_editor(file: Path) -> None:
    """One that begins it with a mark, ends lines as Windows does, and writes a line twice."""
    lines = ["# keys", line_of("acme", KEY), f"  acme: {DIGEST.upper()}  ", ""]
    file.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    assert ApiKeys(str(file)).tenant_of(KEY) == "acme"


def test_keys_of_the_same_beginning_are_told_apart(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "_INDEX_BYTES", 0)  # every key is in one place
    keys = {tenant: new_key() for tenant in "abc"}
    file.write_text("\n".join(line_of(tenant, key) for tenant, key in keys.items()))
    known = ApiKeys(str(file))
    assert [known.tenant_of(key) for key in keys.values()] == ["a", "b", "c"]
    assert known.tenant_of(new_key()) is None
    assert known.tenant_of("") is None
