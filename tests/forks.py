"""A process that has imported everything and forks into programs: half a second each instead of seven.

A line of JSON on stdin asks for a program: the path of its file, or `-m` or `-c` with a module or code as the first
argument; for each process of it its arguments, its environment and the folder it runs in; and the files that take what
it says, as PREFIX.NUMBER.out and PREFIX.NUMBER.err. The answer is two lines: the ids of the processes when they are
there, and, when they have ended, their exit codes and the seconds between the first end and the last. See `server` in
conftest.py.

With TRACED in its environment a program's graphs are traced and differentiated, and run as they are: for what the
generated code of a graph does not decide, as which graphs there are, which costs most of a compilation.
"""

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch
from torch._dynamo.backends.debugging import aot_eager

import kdtrain
from kdtrain import cli, faults
from kdtrain.models.spec import ModelSpec
from kdtrain.parallel.footprint import model_footprint


def main() -> None:
    """Import everything, and fork for each line."""
    warm_up()
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


def warm_up() -> None:
    """Do what each command would do again: import, and fill the caches of libraries."""
    for each in pkgutil.walk_packages(kdtrain.__path__, "kdtrain."):
        if not each.name.endswith("__main__"):
            importlib.import_module(each.name)
    for name in ("datasets", "torch.utils.tensorboard"):  # imported by the commands that use them
        importlib.import_module(name)
    for shape in ("llama", "gpt2"):
        model = kdtrain.testing.tiny_model(shape)  # imports its code
        spec = ModelSpec(name=shape, config=kdtrain.testing.SHAPES[shape], init="scratch")
        # fills PyTorch's caches of what operators do without numbers, a fifth of the time of a short run
        model_footprint(spec, vocab_size=300, seq_len=32, mode="fp32", trained=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)  # makes the table of all names of weights
    cli.parse("distill", ["--student", "a", "--cache", "b", "--out", "c"])
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # as conftest.py has it, with the reason
    gc.freeze()  # a collection in a fork would copy all of its memory


def become(program: str, place: dict, said: str) -> None:
    """Run the program as if it had been started, and end."""
    for handle, path in enumerate((os.devnull, f"{said}.out", f"{said}.err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), handle)
    os.chdir(place["folder"])
    os.environ.update(place["environment"])
    faults.read()
    if "TRACED" in place["environment"]:
        torch.compile = functools.partial(torch.compile, backend=traced)
    sys.path[:0] = filter(None, place["environment"].get("PYTHONPATH", "").split(os.pathsep))
    end(lambda: execute(program, place["argv"]))


def end(program: Callable[[], object]) -> NoReturn:
    """End this process with a program.

    Tearing the interpreter down would take longer than most programs; only its threads are waited for.
    """
    code = 1
    try:
        program()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # as multiprocessing does: pools are told to end, where a join alone would wait for ever
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def execute(program: str, argv: list[str]) -> None:
    """Run the program as the main module."""
    by_name = program in ("-m", "-c")
    sys.argv = argv if by_name else [program, *argv]
    sys.path.insert(0, os.getcwd() if by_name else os.path.dirname(program))
    if program == "-m":
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    elif program == "-c":
        exec(argv[0], {"__name__": "__main__"})
    else:
        runpy.run_path(program, run_name="__main__")


def traced(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **_: object) -> object:
    """Run a graph of `torch.compile` without generating code, whatever its options are."""
    return aot_eager(graph, inputs)


if __name__ == "__main__":
    main()
