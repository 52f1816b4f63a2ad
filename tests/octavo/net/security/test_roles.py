"""By which names a caller is known over gRPC: whole ones, of whatever kind its certificate has."""

from pathlib import Path

import pytest
from cryptography import x509

from octavo.net.security.roles import subject_of_context, uris_of_context

OPERATOR = "octavo:///role/operator"


@pytest.mark.parametrize(
    ("alternatives", "told", "uris", "subject"),
    [
        ([x509.UniformResourceIdentifier(OPERATOR)], {"peer_uri": OPERATOR}, [OPERATOR], [OPERATOR]),
        ([x509.UniformResourceIdentifier(f"{OPERATOR}\0.example")], {"peer_uri": OPERATOR}, [], []),
        ([x509.DNSName(OPERATOR)], {}, [], [f"name={OPERATOR}"]),
        ([x509.DNSName(OPERATOR)], {"x509_common_name": "ann"}, [], ["CN=ann"]),
    ],
)
def test_whole_names_alone_are_known(certificates, alternatives, told, uris, subject):
    """`told` is what gRPC says beside the list of all alternative names, in which it cuts them at zero bytes, too."""
    certificates.with_names("told", alternatives)
    pem = (Path(certificates.folder) / "told.crt").read_bytes()
    found = {name: [value.encode()] for name, value in told.items()}
    found |= {"x509_pem_cert": [pem], "x509_subject_alternative_name": [OPERATOR.encode()]}
    assert uris_of_context(found) == uris
    assert subject_of_context(found) == subject
