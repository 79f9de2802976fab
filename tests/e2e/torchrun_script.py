"""torchrun, whose workers are forks of this process and not interpreters of their own, which take seconds to start."""

import os
import signal
import time
from typing import IO

import forks
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from kdtrain import faults


class Fork:
    """The part of `subprocess.Popen` that torchrun uses, for `python -u -m MODULE ...` in a session of its own."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str], stdout: IO | None, stderr: IO | None, **_: object):
        self.args, self.returncode = args, None
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            for handle, file in ((1, stdout), (2, stderr)):
                if file is not None:
                    os.dup2(file.fileno(), handle)
            os.closerange(3, 4096)  # torchrun's sockets
            os.environ.clear()
            os.environ.update(env)
            faults.read()
            forks.end(lambda: forks.execute(args[2], list(args[3:])))

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int | None:
        """Wait for the end."""
        limit = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < limit:
            time.sleep(0.02)
        return self.returncode


if __name__ == "__main__":
    subprocess_handler.Popen = Fork
    run.main()
