"""A bench for the real command: tiny models and text in a folder, and `kdtrain` started in processes of its own.

Every process is the command as a user starts it, `python -m kdtrain ...`, in the folder of the bench. Each file of
tests has a bench of its own, so that no two can mean different runs by one name. What costs seconds is made once a
session and copied: a cache of the tiny teacher, and a student trained from it.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch

from kdtrain.checkpoint.store import Store, load
from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder

_TEXTS = ("abc", "bisect", "codeop", "heapq", "keyword", "linecache", "stat", "this")
_CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    command: str
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        assert self.code == 0, self.stderr
        return json.loads(self.stdout)

    def ok(self) -> "Done":
        """Itself; a test error with what the command said, unless it ended well."""
        assert self.code == 0, f"{self.command} ended with {self.code}:\n{self.stderr}"
        return self

    def refusal(self) -> str:
        """The one line for people: it is the last on stderr, and the only one that is not a line of the log."""
        *before, last = self.stderr.splitlines() or [""]
        assert last.startswith("kdtrain: ") and len(last) > len("kdtrain: "), self.stderr
        assert [line for line in before if not line[:4].isdigit()] == [], self.stderr
        assert "Traceback" not in self.stderr
        return last


class Bench:
    """A folder with models, specs and text in it, in which commands are run."""

    data = ("--data", "corpus", "--seq-len", 32, "--num-workers", 0)
    """Which text, for every command that reads text."""
    small = (*data, "--num-sequences", 40, "--validation-sequences", 8, "--precision", "fp32")
    """Which text for a cache: 40 sequences to train on and 8 to validate."""
    eager = ("--no-compile", "--precision", "fp32", "--no-tensorboard", "--log-freq", 1)
    """How to train where the test is not about it."""
    fast = ("--lr", 1e-2, "--warmup-steps", 0, "--batch-size", 6)
    """At which rate, so that a few steps change a student."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, *argv: object, fault: str | None = None, **environment: str) -> Done:
        """Run `kdtrain ARGV`; a `fault` (or one of several, joined with commas) that did not fire is an error."""
        words = [str(word) for word in argv]
        variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
        ended = subprocess.run(
            [sys.executable, "-m", "kdtrain", *words],
            cwd=self.root,
            env={**os.environ, **variables, **self._asking(fault)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        done = self.done(words, ended.returncode, ended.stdout, ended.stderr)
        self._assert_fired(fault, done)
        return done

    def _asking(self, fault: str | None) -> dict[str, str]:
        """The environment that asks for a fault."""
        log = self.root / "fired"
        log.unlink(missing_ok=True)
        return {"KDTRAIN_FAULT": fault, "KDTRAIN_FAULT_LOG": str(log)} if fault else {}

    def _assert_fired(self, fault: str | None, *ended: Done) -> None:
        """A fault that was asked for fired, once; else a test error with what the commands said."""
        log = self.root / "fired"
        fired = log.read_text().split() if log.exists() else []
        said = "\n".join(f"{each.command} ended with {each.code}:\n{each.stderr}" for each in ended)
        wanted = [each.split(":")[0] for each in fault.split(",")] if fault else []
        assert sorted(fired) == sorted(wanted), f"{fault} fired not once\n{said}"

    @staticmethod
    def done(words: list[str], code: int, stdout: str, stderr: str) -> Done:
        """What `kdtrain WORDS` was when it ended."""
        return Done(f"kdtrain {' '.join(words)}", code, stdout, stderr)

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """The lines of a run's metrics.jsonl that are about training steps."""
        return [line for line in self.lines(run) if "loss" in line]

    def lines(self, run: str) -> list[dict[str, Any]]:
        """All lines of a run's metrics.jsonl."""
        return [json.loads(line) for line in (self.root / run / "metrics.jsonl").read_text().splitlines()]

    def newest(self, run: str) -> Path:
        """The folder of a run's newest checkpoint."""
        store = Store(self.root / run / "checkpoints")
        return store.path(store.names()[-1])

    def tensors(self, run: str) -> dict[str, torch.Tensor]:
        """The tensors of a run's newest checkpoint."""
        return load(self.newest(run)).tensors

    def student(self, name: str, shape: str = "llama", tokenizer: str = "teacher", **config: Any) -> Path:
        """Write the spec of a random student."""
        entries = [f"{key} = {json.dumps(value)}\n" for key, value in (SHAPES[shape] | config).items()]
        path = self.root / f"{name}.toml"
        path.write_text(f"tokenizer = '{tokenizer}'\n\n[config]\n{''.join(entries)}")
        return path


FORKED = """
import json, os, sys, time
import torch
from kdtrain import cli, faults
from kdtrain.stages import cache_teacher, distill

torch.set_num_threads(1)

def be_the_command(words, environment, said):
    for handle, name in enumerate(("/dev/null", said + ".out", said + ".err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), handle)
    os.environ.update(environment)
    faults.read()
    code = 1
    try:
        cli.main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
"""
"""What a process that has everything imported makes its forks do."""

FORKS = (
    FORKED
    + """
for line in sys.stdin:
    words, asked, said = json.loads(line)
    child = os.fork()
    if child == 0:
        be_the_command(words, asked, said)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
)


class Forks(Bench):
    """The same bench, whose commands are forks of a process that has imported everything: half a second each."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-c", FORKS], cwd=root, env=environment, text=True, stdin=PIPE, stdout=PIPE
        )

    def run(self, *argv: object, fault: str | None = None, **environment: str) -> Done:
        """Run `kdtrain ARGV` in a fork; faults as in the command of its own."""
        words, said = [str(word) for word in argv], self.root / "said"
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps([words, {**environment, **self._asking(fault)}, str(said)]) + "\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        out, err = (said.with_suffix(kind).read_text() for kind in (".out", ".err"))
        done = self.done(words, code, out, err)
        self._assert_fired(fault, done)
        return done

    def close(self) -> None:
        """End the process that forks."""
        self._server.communicate()


@pytest.fixture(scope="module")
def forks(bench: Bench, cached: Done) -> Iterator[Forks]:
    """The bench with its cache, for many short commands."""
    forks = Forks(bench.root)
    yield forks
    forks.close()


RANKS = (
    FORKED
    + """
import torch.distributed, torch.distributed.fsdp

for line in sys.stdin:
    each, said = json.loads(line)
    ranks = {}
    for number, (words, environment, folder) in enumerate(each):
        child = os.fork()
        if child:
            ranks[child] = number
            continue
        os.chdir(folder)
        be_the_command(words, environment, f"{said}.{number}")
    codes, ended = [None] * len(ranks), []
    while None in codes:
        child, status = os.wait()
        codes[ranks[child]] = os.waitstatus_to_exitcode(status)
        ended.append(time.monotonic())
    print(json.dumps([codes, ended[-1] - ended[0]]), flush=True)
"""
)


class Ranks(Bench):
    """The same bench, whose commands are several ranks: forks of one process that has imported everything."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-c", RANKS], cwd=root, env=environment, text=True, stdin=PIPE, stdout=PIPE
        )
        self.apart = 0.0
        """Seconds between the end of the first rank of the last command and that of the last."""

    def launch(self, world: int, *argv: object, fault: str | None = None, **environment: str) -> list[Done]:
        """Run `kdtrain ARGV` in `world` ranks, with the environment that torchrun would give them."""
        return self.launch_each([(argv, self.root)] * world, fault, **environment)

    def launch_each(
        self, ranks: list[tuple[tuple[object, ...], Path]], fault: str | None = None, **environment: str
    ) -> list[Done]:
        """`launch`, where each rank has an ARGV and a folder of its own."""
        world = len(ranks)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": f"{world}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", **environment}
        common = common if world > 1 else environment
        words, said = [[str(word) for word in argv] for argv, _ in ranks], self.root / "said-in-ranks"
        common |= self._asking(fault)
        places = [{**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(world)]
        each = list(zip(words, places, [str(folder) for _, folder in ranks], strict=True))
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps([each, str(said)]) + "\n")
        self._server.stdin.flush()
        codes, self.apart = json.loads(self._server.stdout.readline())
        texts = [[Path(f"{said}.{rank}.{kind}").read_text() for kind in ("out", "err")] for rank in range(world)]
        done = [self.done(own, code, *text) for own, code, text in zip(words, codes, texts, strict=True)]
        self._assert_fired(fault, *done)
        return done

    def ok(self, world: int, *argv: object) -> Done:
        """What rank 0 said of a command that ended well on all ranks, of which the others said nothing."""
        first, *others = self.launch(world, *argv)
        assert [each.code for each in (first, *others)] == [0] * world, "\n".join(e.stderr for e in (first, *others))
        assert [(each.stdout, each.stderr) for each in others] == [("", "")] * len(others)
        return first

    def close(self) -> None:
        """End the process that forks."""
        self._server.communicate()


@pytest.fixture(scope="module")
def ranks_of(bench: Bench) -> Iterator[Ranks]:
    """The bench, for commands in several ranks."""
    ranks = Ranks(bench.root)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """What the benches are copied from: models, specs and text."""
    made = Bench(tmp_path_factory.mktemp("made"))
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = _CHAT
    write_model_folder(made.root / "teacher", opinionated(tiny_model("llama", 300, seed=1)), tokenizer)
    made.student("student", num_hidden_layers=1)
    made.student("gpt2", "gpt2")
    made.student("dropout", "gpt2", resid_pdrop=0.1)
    made.student("qwen", "qwen3")
    _write_corpus(made.root / "corpus")
    _write_chat(made.root / "chat.jsonl")
    return made


@pytest.fixture(scope="session")
def _cache(made: Bench) -> Done:
    return made.run(
        "cache-teacher", "--teacher", "teacher", "--out", "cache", *Bench.small, "--head", 12, "--json"
    ).ok()


@pytest.fixture(scope="session")
def _run(made: Bench, _cache: Done) -> Done:
    return made.run(
        *("distill", "--cache", "cache", "--student", "student.toml", "--out", "run", "--steps", 8, "--lr", 1e-2),
        *("--warmup-steps", 2, "--batch-size", 8, "--checkpoint-freq", 4, "--eval-freq", 4, "--json"),
        *("--no-compile", "--precision", "fp32", "--log-freq", 1),
    ).ok()


@pytest.fixture(scope="module")
def bench(made: Bench, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A file's own folder with models, specs and text in it; nothing is trained yet."""
    root = tmp_path_factory.mktemp("bench")
    for name in ("teacher", "corpus"):
        shutil.copytree(made.root / name, root / name)
    for path in (*made.root.glob("*.toml"), made.root / "chat.jsonl"):
        shutil.copy2(path, root)
    return Bench(root)


@pytest.fixture(scope="module")
def cached(bench: Bench, made: Bench, _cache: Done) -> Done:
    """`cache`: the teacher over the corpus, 12 entries a token."""
    shutil.copytree(made.root / "cache", bench.root / "cache")
    return _cache


@pytest.fixture(scope="module")
def distilled(bench: Bench, made: Bench, cached: Done, _run: Done) -> Done:
    """`run`: the student after 8 steps from `cache`, with checkpoints at 4 and 8."""
    shutil.copytree(made.root / "run", bench.root / "run", symlinks=True)
    return _run


def opinionated(model: torch.nn.Module) -> torch.nn.Module:
    """`model` with its matrices made larger, so that its distributions are far from even."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model


def _write_corpus(folder: Path) -> None:
    folder.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in _TEXTS:
        (folder / f"{name}.txt").write_text((library / f"{name}.py").read_text(encoding="utf-8")[:6000])


def _write_chat(path: Path) -> None:
    """Conversations of very uneven lengths, so that micro-batches differ in the tokens that count."""
    with open(path, "w") as file:
        for number in range(60):
            question, answer = "why? " * (number * 7 % 19), "because. " * (number * 5 % 11 + 1)
            turns = [{"role": "user", "content": question or "?"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
