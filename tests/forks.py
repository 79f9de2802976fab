"""A process that has imported everything and forks into programs: half a second each instead of seven.

A line of JSON on stdin asks for a program: the path of its file; for each process of it its arguments, its environment
and the folder it runs in; and the files that take what it says, as PREFIX.NUMBER.out and PREFIX.NUMBER.err. The answer
is two lines: the ids of the processes when they are there, and, when they have ended, their exit codes and the seconds
between the first end and the last. See `server` in conftest.py.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import sys
import threading
import time
import traceback

import torch

import kdtrain
from kdtrain import faults


def main() -> None:
    """Import everything, and fork for each line."""
    for each in pkgutil.walk_packages(kdtrain.__path__, "kdtrain."):
        if not each.name.endswith("__main__"):
            importlib.import_module(each.name)
    for shape in ("llama", "gpt2"):
        kdtrain.testing.tiny_model(shape)  # imports its code
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a fork would copy all of its memory
    for line in sys.stdin:
        asked, children = json.loads(line), {}
        for number, place in enumerate(asked["places"]):
            child = os.fork()
            if not child:
                become(asked["program"], place, f"{asked['said']}.{number}")
            children[child] = number
        print(json.dumps(list(children)), flush=True)
        codes, ended = [0] * len(children), []
        for _ in children:
            child, status = os.wait()
            codes[children[child]] = os.waitstatus_to_exitcode(status)
            ended.append(time.monotonic())
        print(json.dumps([codes, ended[-1] - ended[0]]), flush=True)


def become(program: str, place: dict, said: str) -> None:
    """Be the program, as if it had been started, and end.

    Tearing the interpreter down would take longer than most programs; only its threads are waited for.
    """
    for handle, path in enumerate((os.devnull, f"{said}.out", f"{said}.err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), handle)
    os.chdir(place["folder"])
    os.environ.update(place["environment"])
    faults.read()
    sys.argv = [program, *place["argv"]]
    sys.path.insert(0, os.path.dirname(program))
    code = 1
    try:
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
