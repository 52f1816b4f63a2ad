"""Which further names of models a router accepts."""

import pytest

from octavo.settings.model_aliases import parse_aliases
from octavo.settings.options import SettingsError
from octavo.settings.router import RouterSettings
from octavo.settings.setting_sources import from_values


def test_the_model_of_each_alias():
    assert parse_aliases(()) == {}
    assert parse_aliases(("chat=smollm2", " small = smollm2 ")) == {"chat": "smollm2", "small": "smollm2"}


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        (("chat",), "must be alias=model"),
        (("=smollm2",), "must be alias=model"),
        (("chat=",), "must be alias=model"),
        (("smollm2=smollm2",), "the name that it has already"),
        (("chat=a", "chat=b"), "'chat' stands there twice"),
        (("chat=small", "small=smollm2"), "'small' is an alias itself: name the model, 'smollm2'"),
    ],
)
def test_what_is_refused_where_it_is_set(entries, why):
    with pytest.raises(ValueError, match=why):
        parse_aliases(entries)
    with pytest.raises(SettingsError, match=f"model_aliases .*{why}"):
        from_values(RouterSettings, {"model_aliases": entries})
