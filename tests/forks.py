"""A process that has imported everything and forks into programs: half a second each instead of seven.

A line of JSON on stdin asks for a program: the path of its file, its arguments, an environment for each process of
it, the folder it runs in, and the files that take what it says, as PREFIX.NUMBER.out and PREFIX.NUMBER.err. The answer
is two lines: the ids of the processes when they are there, and, when they have ended, their exit codes and the seconds
between the first end and the last. See `server` in conftest.py.
"""

import importlib
import json
import os
import pkgutil
import runpy
import sys
import time

import torch

import kdtrain
from kdtrain import faults
from kdtrain.testing import tiny_model


def main() -> None:
    """Fork for each line; the forks return from here, and end as any other process does."""
    for each in pkgutil.walk_packages(kdtrain.__path__, "kdtrain."):
        if not each.name.endswith("__main__"):
            importlib.import_module(each.name)
    for shape in ("llama", "gpt2"):
        tiny_model(shape)  # imports its code
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked, children = json.loads(line), {}
        for number, environment in enumerate(asked["environments"]):
            child = os.fork()
            if not child:
                return become(asked, environment, f"{asked['said']}.{number}")
            children[child] = number
        print(json.dumps(list(children)), flush=True)
        codes, ended = [0] * len(children), []
        for _ in children:
            child, status = os.wait()
            codes[children[child]] = os.waitstatus_to_exitcode(status)
            ended.append(time.monotonic())
        print(json.dumps([codes, ended[-1] - ended[0]]), flush=True)


def become(asked: dict, environment: dict[str, str], said: str) -> None:
    """Be the program, as if it had been started."""
    for handle, path in enumerate((os.devnull, f"{said}.out", f"{said}.err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), handle)
    os.chdir(asked["folder"])
    os.environ.update(environment)
    faults.read()
    sys.argv = [asked["program"], *asked["argv"]]
    sys.path.insert(0, os.path.dirname(asked["program"]))
    runpy.run_path(asked["program"], run_name="__main__")


if __name__ == "__main__":
    main()
