"""`python -m kdtrain`, also as the script `kdtrain` and under torchrun: a failed command always ends its process."""

import contextlib
import faulthandler
import os
import signal
import sys

from kdtrain import process

LIMIT = 10.0
"""Seconds that a process may take to end after its command has failed."""
SPINS = "1000"
"""How often a thread of libgomp (torch's OpenMP on a CPU) looks for work before it sleeps; its own 300,000 take the
cores from a second run, and a thousand cost one alone some 3 % (docs/performance.md)."""


def main() -> None:
    """Run the command; after a failure the process ends even if one of its threads does not."""
    if "RANK" not in os.environ:  # a launcher ends the ranks of a job that failed, and their lines would hide its own
        signal.signal(signal.SIGTERM, process.interrupt)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
            signal.signal(signal.SIGINT, process.interrupt)
    sys.unraisablehook = process.send_again
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is loaded
    try:
        try:
            from kdtrain import cli  # under the `try`, for an interrupt while it is imported

            cli.main()
        finally:  # all is written: a signal ends the process at once
            code = getattr(sys.exc_info()[1], "code", 1)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: os._exit(code))
    except BaseException as failure:
        # a refusal by the only process: nothing is left to do, and a slow end would have code 1 below
        if isinstance(failure, SystemExit) and failure.code == 2 and "RANK" not in os.environ:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(2)
        if not isinstance(failure, SystemExit) or failure.code:
            # A thread of C: Python's own cannot run while the interpreter waits for them, or for a library's lock.
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        if isinstance(failure, KeyboardInterrupt):
            print("kdtrain: interrupted", file=sys.stderr)
            raise SystemExit(1) from None
        raise


if __name__ == "__main__":
    main()
