from hashlib import sha256

from octavo.store import library

REVISION, DIGEST = 25, "7ec5a4d8a0d4471e"


def test_a_changed_text_has_a_new_revision():
    """Servers that have the same revision keep their text: raise library.REVISION, and say both here."""
    text = "\n".join(library.parts().values())
    assert (library.REVISION, sha256(text.encode()).hexdigest()[:16]) == (REVISION, DIGEST)
