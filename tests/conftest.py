"""What holds for every test: one thread, no network, no deadline that a busy machine could miss, no luck.

Generated cases are the same at every run, so that a change is judged by what it did; `make fuzz` draws others.

The environment is set here, before torch or transformers are imported, so that the commands which tests start
inherit it. A test that wants something else passes its own environment to its own process.
"""

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from hypothesis import HealthCheck, settings

from kdtrain.errors import name_flags

ROOT = Path(__file__).resolve().parents[1]
LONGEST = (
    *("e2e/test_distill_in_ranks.py", "e2e/test_resume_is_exact.py", "parallel/test_wrap.py", "e2e/test_rounds.py"),
    *("e2e/test_sweep.py", "training/test_compiled_modes.py", "benchmarks/test_gpu_benchmarks.py"),
    *("test_examples.py", "hostile/test_attacks.py", "e2e/test_main_job.py", "e2e/test_mixture.py"),
    *("e2e/test_cache_in_ranks.py", "e2e/test_guards.py", "e2e/test_adaptive.py", "e2e/test_bad_input.py"),
    *("e2e/test_lora.py", "e2e/test_cache_removed.py", "test_docs.py", "test_library.py"),
    *("benchmarks/test_benchmarks.py",),
)
"""The files that take longest, over twenty seconds each."""

# Two workers on two cores: a second thread each costs more than it brings.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["WANDB_MODE"] = "offline"  # not a default: what these tests log belongs to no account
# What is noted of tokenizers that were tried is not the user's; it stays for the next time.
os.environ.setdefault("KDTRAIN_HOME", str(Path(tempfile.gettempdir(), f"kdtrain-tests-{os.getuid()}")))
for _name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):  # nor what wandb writes there besides a run
    os.environ[_name] = os.environ["KDTRAIN_HOME"]
# What these tests compile is compiled in less time than a pool of compilers takes to start.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def _renew_threads() -> None:
    """Make torch's pool of threads anew in a fork of a test, before anything else is done there.

    A fork marks the pool as corrupt, and whatever thread uses it first replaces it without a lock. Where several do, as
    while weights are loaded, one may find none: `pool INTERNAL ASSERT FAILED`, ATen/ParallelOpenMP.cpp.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_renew_threads)
name_flags()  # messages are tested as the command prints them; tests/test_library.py tests them as a library's

settings.register_profile("fuzz", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("kdtrain", settings.get_profile("fuzz"), derandomize=True)
settings.load_profile("kdtrain")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need a CUDA device or a vLLM where there is none, and put the longest files first.

    Files are given to workers in this order, so that none begins a long one when the others have nothing left.
    """
    folder = Path(__file__).parent
    order = {folder / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    wanting = [] if wanting and _has_cuda() else wanting
    if not os.environ.get("KDTRAIN_TORTURE"):
        wanting += [item for item in items if item.get_closest_marker("torture")]
    if not os.environ.get("KDTRAIN_VLLM"):
        wanting += [item for item in items if item.get_closest_marker("vllm")]
    if wanting:
        config.hook.pytest_deselected(items=wanting)
        items[:] = [item for item in items if item not in wanting]


def pytest_collection_finish() -> None:
    """Leave what is imported out of the collector's passes, a third of a second each with all of it."""
    gc.freeze()


class Server:
    """A process that has imported everything and forks into programs (forks.py), one after the other."""

    def __init__(self, said: Path) -> None:
        self._said = said
        command = [sys.executable, str(Path(__file__).with_name("forks.py"))]
        self._process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, *command: object, world: int = 1, folder: Path = ROOT, **environment: str) -> list[CompletedProcess]:
        """Run `python COMMAND` in `folder`, once for each rank; paths in COMMAND are absolute, or of a `-m` or `-c`."""
        program, *argv = map(str, command)
        self.begin(Path(program), argv, folder, self._said, world, **environment)
        codes, _ = self.end()
        said = [[Path(f"{self._said}.{rank}.{kind}").read_text() for kind in ("out", "err")] for rank in range(world)]
        return [CompletedProcess(command, code, *both) for code, both in zip(codes, said, strict=True)]

    def begin(
        self, program: Path, argv: list[str], folder: Path, said: Path, world: int = 1, **environment: str
    ) -> list[int]:
        """Start `program` in `folder` and return the ids of its processes.

        With a world of several ranks each has the environment that torchrun would give it. Their output goes to
        SAID.RANK.out and SAID.RANK.err.
        """
        return self.begin_each(program, [(argv, folder)] * world, said, **environment)

    def begin_each(
        self, program: Path, each: list[tuple[list[str], Path]], said: Path, **environment: str
    ) -> list[int]:
        """Begin a program as `begin` does, with arguments and a folder for each rank."""
        ranks = zip(each, _ranks(len(each)) if len(each) > 1 else [{}], strict=True)
        places = [{"argv": a, "folder": f, "environment": environment | own} for (a, f), own in ranks]
        asked = {"program": program, "places": places, "said": said}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked, default=str) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> tuple[list[int], float]:
        """Wait for what was begun: exit codes, and the seconds between the first end and the last."""
        codes, apart = self._answer()
        return codes, apart

    def _answer(self) -> list:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start the process that forks, when it is first asked for."""
    server = Server(tmp_path_factory.mktemp("server") / "said")
    yield server
    server.close()


@pytest.fixture
def run_ranks(server: Server, tmp_path: Path):
    """Run a script in several ranks as `kdtrain.testing.run_ranks` does, in forks; return what each prints."""

    def run(script: Path, world: int, *argv: object) -> list[str]:
        said = tmp_path / "said"
        environment = _ranks(1)[0] if world == 1 else {}
        server.begin(script, [str(word) for word in argv], tmp_path, said, world, **environment)
        codes, _ = server.end()
        assert codes == [0] * world, "\n".join(Path(f"{said}.{rank}.err").read_text() for rank in range(world))
        return [Path(f"{said}.{rank}.out").read_text() for rank in range(world)]

    return run


def _ranks(world: int) -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": f"{world}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    return [{**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(world)]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
