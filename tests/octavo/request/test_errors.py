"""The tree: every class can be told from every other by its reason, and documents itself."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.request import errors
from octavo.request.errors import Code, Failure, ServingError

ALL = list(errors.CLASSES.values())


@pytest.mark.parametrize("cls", ALL)
def test_every_class_says_what_it_is_and_whether_to_retry(cls):
    assert isinstance(cls.code, Code)
    assert cls.__doc__
    assert cls.__doc__ != ServingError.__doc__ or cls is ServingError
    assert errors.class_of(cls.reason) is cls
    assert not cls.retryable or cls.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)
    assert cls.retryable or cls.code is not Code.UNAVAILABLE


def test_the_reasons_are_in_the_contract(root):
    text = (root / "docs/protocol-reference.md").read_text(encoding="utf-8").split("\n## Errors\n")[1].split("\n## ")[0]
    files = [file for folder in ("octavo", "router", "gpu_worker") for file in (root / folder).rglob("*.py")]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    code = re.sub(r"^class \w+\(.*\):$", "", code, flags=re.MULTILINE)
    for cls in ALL:
        row = next((line for line in text.splitlines() if line.startswith(f"| {cls.reason} |")), None)
        assert row, cls.reason
        assert row.split("|")[2].strip() == cls.code.name
        assert row.split("|")[3].strip() == ("yes" if cls.retryable else "no")
        assert row.split("|")[4].strip()
        if cls is not ServingError:  # a reason in the tree is raised somewhere
            assert re.search(rf"\b{cls.__name__}\(|\[{cls.__name__}\]|errors\.{cls.__name__}\b", code), cls.reason
            assert "reserved" not in f"{row} {cls.__doc__}".lower()


@given(st.text(), st.integers(0, 10**9), st.dictionaries(st.text(), st.text()), st.sampled_from(ALL))
def test_an_error_is_restored_from_what_was_kept_of_it(message, retry_ms, metadata, cls):
    error = cls.restore(message, retry_ms, metadata)
    assert type(error) is cls
    assert (error.message, error.retry_after_ms, error.metadata) == (message, retry_ms, metadata)
    assert str(error) == message


@given(st.text(), st.sampled_from(ALL))
def test_a_failure_survives_the_record_and_becomes_its_error_again(message, cls):
    failure = cls.restore(message).failure()
    assert Failure.from_json(failure.to_json()) == failure
    assert type(failure.error()) is cls
    assert failure.error().message == message
    assert type(Failure(14, "FROM_THE_FUTURE", "m", True).error()) is ServingError
    invalid = errors.InvalidArgument("top_p", message)
    assert (invalid.field, invalid.message) == ("top_p", f"top_p: {message}")
    assert errors.InvalidArgument.restore(invalid.message, 0, invalid.metadata).field == "top_p"
