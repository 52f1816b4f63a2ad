"""The files of TLS: what is refused by name, and what happens while they are being replaced."""

import shutil

import pytest
from certificates import Certificates
from cryptography import x509

from octavo.local import development_ca
from octavo.local.certificate_files import certificate_files
from octavo.local.development_ca import is_complete, make_certificates
from octavo.net.security.roles import PeerRole
from octavo.wire import tls
from octavo.wire.tls import TlsError, TlsFiles


def test_files_that_cannot_be_used_are_named(certificates, tmp_path):
    cert, key, ca = certificate_files(certificates.folder, PeerRole.ROUTER)
    _, other, _ = certificate_files(certificates.folder, PeerRole.WORKER)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "broken").write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    none, text, broken = (str(tmp_path / name) for name in ("none", "text", "broken"))
    for files, says in [
        ((cert, "", ca), "--tls-cert and --tls-key belong together"),
        ((none, key, ca), "--tls-cert .*none: No such file"),
        ((text, key, ca), "--tls-cert .*text: is no PEM file"),
        ((cert, other, ca), "cannot be used together"),
        ((cert, key, broken), "--tls-ca .*broken: holds no certificate"),
    ]:
        with pytest.raises(TlsError, match=says):
            TlsFiles(*files)


def test_half_replaced_files_keep_the_last_pair(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tls, "CHECK_S", 0.0)
    used, new = Certificates(tmp_path / "used"), Certificates(tmp_path / "new")
    files = used.files("worker")
    first = files.current()
    assert files.current() is first
    shutil.copy(new.folder / "worker.crt", used.folder / "worker.crt")
    assert files.current() is first
    assert files.current() is first
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    shutil.copy(new.folder / "worker.key", used.folder / "worker.key")
    second = files.current()
    assert second.cert == (new.folder / "worker.crt").read_bytes() != first.cert
    (used.folder / "worker.key").unlink()
    assert files.current() is second


def test_certificates_have_one_role_and_one_reader(tmp_path):
    folder = tmp_path / "a" / "tls"
    make_certificates(folder, ["gpu-1.example", "10.1.2.3"])
    assert is_complete(folder)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    authority = (folder / "ca.crt").read_bytes()
    before = (folder / "worker.crt").read_bytes()
    make_certificates(folder)  # again: the authority stays, and the names
    assert (folder / "ca.crt").read_bytes() == authority
    assert (folder / "worker.crt").read_bytes() != before
    names = x509.load_pem_x509_certificate((folder / "worker.crt").read_bytes()).extensions
    known = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "gpu-1.example" in known.get_values_for_type(x509.DNSName)
    assert "10.1.2.3" in map(str, known.get_values_for_type(x509.IPAddress))
    (folder / "client.key").unlink()
    assert not is_complete(folder)
    make_certificates(tmp_path / "late", days=int(development_ca.LIFE_DAYS / 10) - 1)  # near their end
    assert not is_complete(tmp_path / "late")
