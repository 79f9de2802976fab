"""`python -m kdtrain`, also as the script `kdtrain` and under torchrun: a failed command always ends its process."""

import faulthandler
import os

from kdtrain import cli

LIMIT = 10.0
"""Seconds that a process may take to end after its command has failed."""


def main() -> None:
    """Run the command; after a failure the process ends even if one of its threads does not."""
    try:
        cli.main()
    except BaseException as failure:
        if not isinstance(failure, SystemExit) or failure.code:
            # A thread of C: Python's own cannot run while the interpreter waits for them, or for a library's lock.
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        raise


if __name__ == "__main__":
    main()
