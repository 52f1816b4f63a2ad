"""Further names of models, as the setting `model_aliases` of a router writes them: alias=model."""

from collections.abc import Iterable


def parse_aliases(entries: Iterable[str]) -> dict[str, str]:
    """The model of each alias. Raises a ValueError that names the entry that is wrong, and says what would be right."""
    aliases: dict[str, str] = {}
    for entry in entries:
        alias, equals, model = (part.strip() for part in entry.partition("="))
        if not (alias and equals and model):
            raise ValueError(f"{entry!r} must be alias=model, such as chat=smollm2")
        if alias == model:
            raise ValueError(f"{entry!r} names the model by the name that it has already")
        if alias in aliases:
            raise ValueError(f"{alias!r} stands there twice: an alias means one model")
        aliases[alias] = model
    for alias, model in aliases.items():
        if model in aliases:
            raise ValueError(f"{alias}={model}: {model!r} is an alias itself: name the model, {aliases[model]!r}")
    return aliases
