"""The demo, whose commands are forks of this process and not interpreters of their own, which take seconds to start."""

import os
import signal
import subprocess
from types import SimpleNamespace

import forks

from benchmarks.harness import command
from benchmarks.science import demo
from kdtrain import cli


class Fork:
    """What `harness.command` uses of `subprocess.Popen`."""

    def __init__(self, words: list[str], *, process_group: int, **_: object) -> None:
        out, into = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.setpgid(0, process_group)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(into, 1)
            forks.end(lambda: cli.main(words[3:]))
        os.close(into)
        self._out = os.fdopen(out)

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self._pid, number)

    def communicate(self) -> tuple[str, None]:
        """Wait for the end: what was written to stdout."""
        written = self._out.read()
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return written, None


if __name__ == "__main__":
    command.subprocess = SimpleNamespace(Popen=Fork, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    demo.main(command.options(demo.Demo))
