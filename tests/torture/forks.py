"""`kdtrain` in a fork of this process, which has everything imported: with faults, or killed after a time."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from kdtrain import cli, faults
from kdtrain.testing import tiny_tokenizer, write_model_folder
from tests.forks import warm_up

TEXT = ("--data", "text.txt", "--seq-len", "32", "--num-workers", "0", "--precision", "fp32")


def command(argv: list[str], asked: Sequence[str] = (), kill_after: float | None = None) -> int:
    """Run `kdtrain ARGV` in a fork, with faults; return its exit code, negative where a signal ended it."""
    Path("fired").unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        said = os.open("said", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.environ |= {"KDTRAIN_FAULT": ",".join(asked), "KDTRAIN_FAULT_LOG": "fired"}
        faults.read()
        _leave(lambda: cli.main(argv))
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _leave(command: Callable[[], None]) -> None:
    """End this process with the exit code of the command, and without what the parent's would do at its end."""
    code = 1
    try:
        command()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fired() -> list[str]:
    """Return the faults that fired in the last command."""
    return Path("fired").read_text().split() if Path("fired").exists() else []


def said() -> str:
    """Return the end of the last command's output."""
    return Path("said").read_text()[-500:]


def materials(teacher: PreTrainedModel) -> None:
    """Write a tiny teacher's folder and a text into the working folder."""
    write_model_folder(Path("teacher"), teacher, tiny_tokenizer(300))
    warm_up()
    words = random.Random(5)
    Path("text.txt").write_text("".join(words.choice("abcdefgh \n") for _ in range(20_000)))
