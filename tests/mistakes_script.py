"""Run the command lines on stdin, a JSON list of lists of words, where nothing heavy can be imported.

Prints a JSON list of [exit code, what was printed, seconds of this process], one for each.
"""

import contextlib
import io
import json
import sys
import time
from importlib.machinery import ModuleSpec

HEAVY = ("torch", "transformers", "datasets", "h5py", "numpy", "pyarrow", "matplotlib", "rich")


class Refuse:
    """A finder that refuses heavy modules."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find nothing; raise ModuleNotFoundError for a heavy module."""
        if name.split(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"refused: {name}")
        return None


def main() -> None:
    """Run each line."""
    from kdtrain import cli

    answers = []
    for argv in json.load(sys.stdin):
        printed, started, code = io.StringIO(), time.process_time(), None
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                cli.main(argv)
            except SystemExit as stop:
                code = stop.code
            except ModuleNotFoundError as error:  # the line is right: the command begins
                print(error)
        answers.append([code, printed.getvalue(), time.process_time() - started])
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    sys.meta_path.insert(0, Refuse())  # type: ignore[arg-type]
    main()
