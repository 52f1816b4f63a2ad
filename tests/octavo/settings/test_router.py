"""Which further names of models, and which origins of web pages, a router accepts."""

import pytest

from octavo.settings.options import SettingsError
from octavo.settings.router import RouterSettings, parse_aliases
from octavo.settings.setting_sources import from_values

NO_ORIGINS = (
    *("", "chat.example.com", "https://", "https://a/b", "https://a?b", "https://a#b", "https://u@a", "https://a:x"),
    *("https://a b", "https://é.com", "null", "https://*", "https://[::1"),
)


def test_the_model_of_each_alias():
    assert parse_aliases(()) == {}
    assert parse_aliases(("chat=smollm2", " small = smollm2 ")) == {"chat": "smollm2", "small": "smollm2"}


@pytest.mark.parametrize(
    ("name", "entries", "why"),
    [
        ("model_aliases", ("chat",), "must be alias=model"),
        ("model_aliases", ("=smollm2",), "must be alias=model"),
        ("model_aliases", ("chat=",), "must be alias=model"),
        ("model_aliases", ("smollm2=smollm2",), "the name that it has already"),
        ("model_aliases", ("chat=a", "chat=b"), "'chat' stands there twice"),
        ("model_aliases", ("chat=small", "small=smollm2"), "'small' is an alias itself: name the model, 'smollm2'"),
        *(("http_origins", (text,), "SCHEME://HOST") for text in NO_ORIGINS),
    ],
)
def test_what_is_refused_where_it_is_set(name, entries, why):
    with pytest.raises(SettingsError, match=f"{name} .*{why}"):
        from_values(RouterSettings, {name: entries})
