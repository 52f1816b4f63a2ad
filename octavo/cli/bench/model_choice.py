"""Which of an endpoint's models is asked."""

from collections.abc import Sequence

from octavo.process.command_error import CommandError
from octavo.request.errors import closest

LISTED = 12  # at most so many names in a message


def chosen_model(url: str, wanted: str, names: Sequence[str]) -> str:
    """The model to ask.

    Raises CommandError, which lists the models, if the wanted one is not served, or if none is wanted of several.
    """
    listed = ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
    if not names:
        if wanted:
            return wanted  # the endpoint does not say what it serves
        raise CommandError(f"{url} lists no models: start a worker, or name the model with --model")
    if not wanted:
        if len(names) > 1:
            raise CommandError(f"{url} serves several models: choose one with --model: {listed}")
        return names[0]
    if wanted not in names:
        raise CommandError(f"{url} has no model {wanted!r}{closest(wanted, names)}; it serves {listed}")
    return wanted
