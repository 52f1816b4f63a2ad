"""Origins are written as browsers write them, and what is none is refused by name."""

import pytest

from octavo.settings.http_origins import parse_origins
from octavo.settings.options import SettingsError
from octavo.settings.router import RouterSettings
from octavo.settings.setting_sources import from_values


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ("https://chat.example.com", "https://chat.example.com"),
        (" HTTPS://Chat.Example.com/ ", "https://chat.example.com"),
        ("https://chat.example.com:443", "https://chat.example.com"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:80", "http://[::1]"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("*", "*"),
    ],
)
def test_an_origin_is_as_browsers_write_it(given: str, means: str) -> None:
    assert parse_origins([given]) == (means,)
    assert from_values(RouterSettings, {"http_origins": (given,)}).http_origins == (given,)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "chat.example.com",
        "https://",
        "https://a/b",
        "https://a?b",
        "https://a#b",
        "https://u@a",
        "https://a:x",
        "https://a b",
        "https://é.com",
        "null",
        "https://*",
        "https://[::1",
    ],
)
def test_what_is_no_origin_is_refused(given: str) -> None:
    with pytest.raises(SettingsError, match=r"http_origins .*SCHEME://HOST"):
        from_values(RouterSettings, {"http_origins": (given,)})
