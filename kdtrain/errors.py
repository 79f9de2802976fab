"""The two ways a command ends badly, and the exit code of each.

A `UsageError` is raised before anything was done, for what cannot be: an unknown option, a vocabulary that does not
fit, a cache that is not finished. A `RunError` is raised for what went wrong while running. Both carry one line
that says what is wrong, where, and what to do; the command prints that line and no traceback.
"""


class UsageError(ValueError):
    """The command was asked for something that cannot be; it ends with exit code 2."""


class RunError(RuntimeError):
    """The command failed while it was running; it ends with exit code 1."""
