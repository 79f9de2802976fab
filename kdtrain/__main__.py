"""The entry point of `python -m kdtrain`, of the script `kdtrain`, and of torchrun."""

import faulthandler
import os

from kdtrain import cli

LIMIT = 10.0
"""Seconds until a process ends after its command has failed."""


def main() -> None:
    """Run the command. The process of a failed command ends even if one of its threads never does."""
    try:
        cli.main()
    except BaseException as failure:
        if not isinstance(failure, SystemExit) or failure.code:
            # A C thread: Python threads cannot run while the interpreter waits for them, or for a library's lock.
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        raise


if __name__ == "__main__":
    main()
