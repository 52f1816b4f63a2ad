"""The file of API keys: what stands in it counts, and what cannot be read is named by its line and never shown."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.net.security import api_keys
from octavo.net.security.api_keys import ApiKey, ApiKeyError, ApiKeys, line_of, new_key
from octavo.request.limits import TenantQuota

OTHER = "octavo-" + "other" * 9
KEY = "octavo-" + "fixed" * 8  # no new one: parallel processes must name tests alike
DIGEST = line_of("acme", KEY).partition(":")[2]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("acme", "TENANT:SHA256"),
        ("acme:12", "64 hex digits"),
        (f"acme:{'g' * 64}", "64 hex digits"),
        (f"acme:{DIGEST} # of Ann", "expires=TIME"),
        (f"acme:{DIGEST} expires=tomorrow", "a day"),
        (f"acme:{DIGEST} expires=2027-01-31T12:00:00", "with its zone"),
        (f"acme:{DIGEST} max-streams=-1", "max-streams= must be a number"),
        (f"acme:{DIGEST} max-streams=1 max-streams=1", "once each"),
        (f"acme:{DIGEST} tokens-per-minute=9999999999", "tokens-per-minute= must be a number"),
        (f"acme:{DIGEST} max-streams=2\nacme:{'0' * 64} max-streams=3", "another max-streams than an earlier line"),
        (f"acme:{DIGEST[:-1]}é", "64 hex digits"),
        (f":{DIGEST}", "a tenant's name"),
        (f"{'a' * 65}:{DIGEST}", "a tenant's name"),
        (f"bolt:{DIGEST}", "the key of line 2, which is another tenant's"),
        (f"ac\u2028me:{DIGEST}", "a tenant's name"),  # a line of one editor is one line here
        (KEY, "TENANT:SHA256"),  # the key itself, by mistake
    ],
)
def test_an_unreadable_line_is_named_and_not_shown(file, line, says):
    file.write_text(f"# fine\n{line_of('acme', KEY)}\n\n{line}\n")
    number = 4 + line.count("\n")
    with pytest.raises(ApiKeyError, match=rf"^--api-keys .*keys, line {number}: .*{says}") as refused:
        ApiKeys(str(file))
    assert line not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "says"), [(None, "No such file"), (b"acme:\xff", "UTF-8"), ("acme:12".encode("utf-16"), "UTF-8")]
)
def test_a_file_that_cannot_be_read_is_named(file, content, says):
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ApiKeyError, match=f"^--api-keys .*keys: .*{says}"):
        ApiKeys(str(file))


@given(
    content=st.binary(max_size=200)
    | st.text().map(lambda text: f"{text}:{DIGEST}".encode("utf-8", "replace"))
    | st.text("ab:0\n\r\f\x1e\u2028# ", max_size=40).map(str.encode)
)
def test_any_file_is_taken_or_refused(content, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "drawn-keys"
    file.write_bytes(content)
    said = ""
    try:
        ApiKeys(str(file)).find(KEY)
    except ApiKeyError as error:
        said = str(error)
    assert not said or said.startswith(f"--api-keys {file}")


def test_what_is_written_is_read(file):
    """Of two ends the later one counts; the tenant's limits are those of whichever of its lines has them."""
    quota, now = TenantQuota(3, 1000), float(int(time.time()))
    lines = [line_of("acme", KEY, now + 60, quota), line_of("acme", OTHER)]
    lines += [line_of("acme", KEY, end, quota) for end in (now + 120, now - 60)]
    file.write_text("\n".join([*lines, f"dent:{'1' * 64} max-streams=0"]))
    known = ApiKeys(str(file))
    assert known.find(KEY) == ApiKey("acme", bytes.fromhex(DIGEST), now + 120)
    assert known.find(OTHER).state == "valid"
    usual = TenantQuota(7, 9)
    quotas = [known.quota_of(tenant, usual) for tenant in ("acme", "bolt", "dent")]
    assert quotas == [quota, usual, TenantQuota(0, 9)]


def test_an_expired_key_is_known_and_said_once(file, caplog):
    ends = {"soon": time.time() + 3600, "past": time.time() - 1, "late": time.time() + 30 * 24 * 3600}
    keys = {tenant: new_key() for tenant in ends}
    file.write_text("\n".join(line_of(tenant, keys[tenant], end) for tenant, end in ends.items()))
    known = ApiKeys(str(file))
    found = {tenant: known.find(key) for tenant, key in keys.items()}
    states = {tenant: key.state for tenant, key in found.items() if key}
    assert states == {"soon": "expiring", "past": "expired", "late": "valid"}
    assert [value[1:] for value in known.values()] == [(1, ("valid",)), (1, ("expiring",)), (1, ("expired",))]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(found[name].id in " ".join(said) for name in ("soon", "past"))
    assert not any(key in caplog.text for key in keys.values())


@given(st.floats(1, 2**37).map(math.floor))
def test_a_time_is_read_as_it_is_written(seconds):
    assert api_keys.parse_time(api_keys.time_text(seconds)) == seconds
