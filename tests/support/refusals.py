"""What a validator says."""

from octavo.request.errors import InvalidArgument


def refusal(call, *args, **kwargs):
    """The InvalidArgument a call raises, None if it passes. Whatever else it raises fails the test."""
    try:
        call(*args, **kwargs)
    except InvalidArgument as error:
        return error
    return None
