"""`python -m kdtrain`, the script `kdtrain`, and how torchrun starts the command: in a process that ends."""

import faulthandler
import os

from kdtrain import cli

LIMIT = 10.0
"""Seconds that a process may take to end after its command has failed."""


def main() -> None:
    """Run the command. A process whose command has failed ends, also where a thread of it never does."""
    try:
        cli.main()
    except BaseException as failure:
        if not isinstance(failure, SystemExit) or failure.code:
            # A thread of C: Python's own cannot run while the interpreter waits for them, or for a library's lock.
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        raise


if __name__ == "__main__":
    main()
