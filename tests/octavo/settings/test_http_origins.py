"""Origins are written as browsers write them, and what is none is refused by name."""

import pytest

from octavo.settings.options import SettingsError
from octavo.settings.router import RouterSettings
from octavo.settings.setting_sources import from_values


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
