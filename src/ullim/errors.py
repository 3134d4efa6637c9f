"""The two ways Ullim ends badly, so that every command can tell them apart.

`BadInput` is the user's to mend (exit status 2); `RunFailed` is a run that could not go on (exit status 1).
Both carry one message that names the field, file or peer, what was found, and what would be right.
"""


class UllimError(Exception):
    """Base of every error that a person is meant to read; anything else is a bug and shows its traceback."""


class BadInput(UllimError):
    """A config, file or argument is wrong. Raised before any process starts wherever possible."""


class RunFailed(UllimError):
    """A run that started cannot go on: no progress, too many bad steps, a peer lost beyond its budget."""
