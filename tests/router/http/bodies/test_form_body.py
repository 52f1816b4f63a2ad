"""Forms: names, boundaries and values as clients spell them."""

import pytest

from octavo.request.errors import InvalidArgument
from router.http.bodies.form_body import parse_form


def form(*parts, kind="multipart/form-data; boundary=e"):
    data = b"".join(
        b"--e\r\nContent-Disposition: form-data" + head + b"\r\n\r\n" + value + b"\r\n" for head, value in parts
    )
    return dict(parse_form(data + b"--e--\r\n", kind, ("file",)))


@pytest.mark.parametrize(
    "head",
    [
        b'; name="file"',
        b"; name=file",
        b'; NAME=file; filename="a.wav"',
        b'; name="file"; filename="b; name="; x="y"',
        b'; filename="; name=\\"other\\""; name="file"',
        b'; filename*=UTF-8\'\'%20; name="file"; name="other"',
        b" ;name=file ; filename=a.wav",
    ],
)
def test_parameters_are_read_one_by_one_and_the_first_counts(head):
    assert form((head, b"\0")) == {"file": b"\0"}


@pytest.mark.parametrize(
    "kind",
    ['multipart/form-data; boundary="e"', "Multipart/Form-Data; x-boundary=f; charset=x; Boundary=e; boundary=f"],
)
def test_a_boundary_is_a_parameter_of_its_own(kind):
    assert form((b"; name=file", b"a"), kind=kind) == {"file": b"a"}
    with pytest.raises(InvalidArgument, match="with a boundary"):
        form((b"; name=file", b"a"), kind="multipart/form-data; x-boundary=e")


def test_values_are_texts_unless_they_are_more():
    """Texts stay what they are; others are JSON, but null and what has quotes is text; bytes stay bytes."""
    stay = dict.fromkeys(
        ("stop", "prefix", "on_disconnect", "truncation_side", "language", "prompt", "bad_words"), b"[1]"
    )
    found = form(*((b"; name=" + name.encode(), value) for name, value in stay.items()))
    assert found == dict.fromkeys(stay, "[1]")
    for value, meant in (
        (b"7", 7),
        (b"true", True),
        (b'{"5": 1}', {"5": 1}),
        (b"null", "null"),
        (b'"a"', '"a"'),
        (b"NaN", "NaN"),
        (b"", ""),
        (b"\xff", b"\xff"),
        (b"[" + b" " * 70_000 + b"]", "[" + " " * 70_000 + "]"),
    ):
        assert form((b"; name=x", value)) == {"x": meant}
    with pytest.raises(InvalidArgument, match=r"^language: is no text"):
        form((b"; name=language", b"\xff"))


def test_what_comes_several_times_is_a_list_if_its_name_says_so():
    assert form((b"; name=a[]", b"x"), (b"; name=b", b"1"), (b"; name=a[]", b"y")) == {"a[]": ["x", "y"], "b": 1}
    with pytest.raises(InvalidArgument, match=r"^b: is there twice"):
        form((b"; name=b", b"1"), (b"; name=b", b"1"))
