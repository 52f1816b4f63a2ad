"""`octavo cert` and `octavo key`: what they write, print and refuse."""

import json
import time

import pytest

from octavo.cli import main
from octavo.local.development_ca import is_complete
from octavo.net.security.api_keys import ApiKeys
from octavo.request.limits import NO_QUOTA, TenantQuota


def test_certificates_and_the_lines_that_use_them(capsys, tmp_path):
    folder = tmp_path / "tls"
    assert main(["cert", str(folder), "--host", "gpu-1.example", "--host", "10.0.0.7"]) == 0
    said = capsys.readouterr().out
    assert is_complete(folder)
    commands = [f"octavo {name} --tls-cert" for name in ("router", "worker", "generate")]
    assert all(words in said for words in (*commands, "grpcurl -cacert"))
    assert "PRIVATE" not in said
    assert main(["cert", str(folder), "--days", "0"]) == 1
    assert "--days 0: must be 1" in capsys.readouterr().err
    (folder / "router.crt").write_text("damaged")
    assert not is_complete(folder)
    (folder / "ca.key").write_text("damaged")
    assert main(["cert", str(folder)]) == 1
    assert "remove ca.crt and ca.key, or use another folder" in capsys.readouterr().err


def test_a_key_is_printed_once(capsys, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# keys")
    keys = {}
    for tenant in ("acme", "bolt"):
        assert main(["key", "new", tenant, "--file", str(file), "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        keys[tenant] = printed["key"]
        assert printed["line"] in file.read_text().splitlines()
    assert file.stat().st_mode & 0o777 == 0o600
    assert main(["key", "new", "cork", "--file", str(file), "--expires", "2w"]) == 0
    told = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[:3]]
    assert [name for name, _ in told] == ["key", "line", "until"]
    keys["cork"] = told[0][1]
    assert {ApiKeys(str(file)).find(key).tenant for key in keys.values()} == keys.keys()
    assert not any(key in file.read_text() for key in keys.values())
    assert main(["key", "new", "no such tenant"]) == 1
    assert "a tenant's name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *((["--expires", text], "must be ahead") for text in ("30", "0d", "2020-01-01", "999999w", "soon")),
        (["--max-streams", "-1"], "must be from 0"),
        (["--tokens-per-minute", "1000000001"], "must be from 0"),
    ],
)
def test_a_key_that_cannot_be_is_refused(capsys, tmp_path, arguments, says):
    file = tmp_path / "keys"
    assert main(["key", "new", "acme", "--file", str(file), *arguments]) == 1
    printed = capsys.readouterr()
    assert says in printed.err
    assert not printed.out
    assert not file.exists()


def test_a_quiet_key_is_alone_on_stdout(capsys, tmp_path):
    file = tmp_path / "keys"
    limits = ["--expires", "30d", "--max-streams", "4", "--tokens-per-minute", "1000"]
    assert main(["key", "new", "acme", "--quiet", "--file", str(file), *limits]) == 0
    printed = capsys.readouterr()
    found = ApiKeys(str(file)).find(printed.out.removesuffix("\n"))
    assert found is not None
    assert not printed.err
    assert 29 < (found.expires_at - time.time()) / (24 * 3600) <= 30
    assert ApiKeys(str(file)).quota_of("acme", NO_QUOTA) == TenantQuota(4, 1000)
    assert main(["key", "new", "acme", "--quiet"]) == 0  # without a file the line is not lost
    printed = capsys.readouterr()
    file.write_text(printed.err)
    assert ApiKeys(str(file)).find(printed.out.strip()) is not None
