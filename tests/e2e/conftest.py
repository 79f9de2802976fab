"""A bench for the real command: tiny models and text in a folder, and `kdtrain` run in it in processes of its own.

Most of them are forks of a process that has imported everything, `server` of the conftest.py above; `Bench.alone`
starts the command as a user does, `python -m kdtrain ...`. Each file of tests has a bench of its own, so that no two
can mean different runs by one name. What costs seconds is made once a session and copied: a cache of the tiny teacher,
and a student trained from it, the latter by the command that a user starts.
"""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import kdtrain
from kdtrain.checkpoint.store import Store, load
from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder

_TEXTS = ("abc", "bisect", "codeop", "heapq", "keyword", "linecache", "stat", "this")
_CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"

_TIMING = (
    *("tok/s", "tok/s_last", "eta_h", "data_wait_s"),
    *("memory_resident_mb", "memory_growth_mb", "checkpoint_age", "loss_avg", "clipped_share"),
)


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
        """Return itself; fail with the command's output unless it exited with 0."""
        assert self.code == 0, f"{self.command} ended with {self.code}:\n{self.stderr}"
        return self

    def refusal(self) -> str:
        """Return the one line for people: it is the last on stderr, and the only one that is not a line of the log."""
        *before, last = self.stderr.splitlines() or [""]
        assert last.startswith("kdtrain: ") and len(last) > len("kdtrain: "), self.stderr
        assert [line for line in before if not re.match(r"\d\d:\d\d ", line)] == [], self.stderr
        assert "Traceback" not in self.stderr
        return last


class Bench:
    """A folder with models, specs and text in it, in which commands are run."""

    data = ("--data", "corpus", "--seq-len", 32, "--num-workers", 0)
    """Which text, for every command that reads text."""
    small = (*data, "--num-sequences", 40, "--validation-sequences", 8, "--precision", "fp32")
    """Which text for a cache: 40 sequences to train on and 8 to validate."""
    eager = ("--no-compile", "--precision", "fp32", "--log-to", "none", "--log-freq", 1)
    """How to train where the test is not about it."""
    fast = ("--lr", 1e-2, "--warmup-steps", 0, "--batch-size", 6)
    """At which rate, so that a few steps change a student."""

    def __init__(self, root: Path, server: Any) -> None:
        self.root, self.server = root, server
        self._words: list[str] = []
        self.apart = 0.0
        """Seconds between the end of the first rank of the last command and that of the last."""

    def alone(self, *argv: object) -> Done:
        """Run `kdtrain ARGV` as a user does, in a process of its own."""
        words = [str(word) for word in argv]
        ended = subprocess.run(
            [sys.executable, "-m", "kdtrain", *words],
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return self.done(words, ended.returncode, ended.stdout, ended.stderr)

    def run(self, *argv: object, fault: str | None = None, **environment: str) -> Done:
        """Run `kdtrain ARGV`; a `fault` (or one of several, joined with commas) that did not fire is an error."""
        (done,) = self.launch(1, *argv, fault=fault, **environment)
        return done

    def launch(self, world: int, *argv: object, fault: str | None = None, **environment: str) -> list[Done]:
        """Run `kdtrain ARGV` in `world` ranks, with the environment that torchrun would give them."""
        self.begin(*argv, world=world, **environment, **self._asking(fault))
        done = self.end()
        self._assert_fired(fault, *done)
        return done

    def launch_each(
        self, ranks: list[tuple[tuple[object, ...], Path]], fault: str | None = None, **environment: str
    ) -> list[Done]:
        """Launch a command as `launch` does, with an ARGV and a folder for each rank."""
        program, each = _program(), [([str(word) for word in argv], folder) for argv, folder in ranks]
        self._words = each[0][0]
        self.server.begin_each(program, each, self.root / "said", **environment, **self._asking(fault))
        done = self.end()
        self._assert_fired(fault, *done)
        return done

    def begin(self, *argv: object, world: int = 1, **environment: str) -> list[int]:
        """Start `kdtrain ARGV`; return the ids of its processes. Nothing else may be started before its `end`."""
        self._words = [str(word) for word in argv]
        return self.server.begin(_program(), self._words, self.root, self.root / "said", world, **environment)

    def end(self) -> list[Done]:
        """Wait for the ranks, and return their results."""
        codes, self.apart = self.server.end()
        done = []
        for rank, code in enumerate(codes):
            out, err = ((self.root / f"said.{rank}.{kind}").read_text() for kind in ("out", "err"))
            done.append(self.done(self._words, code, out, err))
        return done

    def ok(self, world: int, *argv: object) -> Done:
        """Run a command that exits with 0 on all ranks; return the output of rank 0. The others print nothing."""
        first, *others = self.launch(world, *argv)
        assert [each.code for each in (first, *others)] == [0] * world, "\n".join(e.stderr for e in (first, *others))
        assert [(each.stdout, each.stderr) for each in others] == [("", "")] * len(others)
        return first

    def _asking(self, fault: str | None) -> dict[str, str]:
        """Return the environment that asks for a fault."""
        log = self.root / "fired"
        log.unlink(missing_ok=True)
        return {"KDTRAIN_FAULT": fault, "KDTRAIN_FAULT_LOG": str(log)} if fault else {}

    def _assert_fired(self, fault: str | None, *ended: Done) -> None:
        """Check that the fault fired, once; else fail with the output of the commands."""
        log = self.root / "fired"
        fired = log.read_text().split() if log.exists() else []
        said = "\n".join(f"{each.command} ended with {each.code}:\n{each.stderr}" for each in ended)
        wanted = [each.split(":")[0] for each in fault.split(",")] if fault else []
        assert sorted(fired) == sorted(wanted), f"{fault} fired not once\n{said}"

    @staticmethod
    def done(words: list[str], code: int, stdout: str, stderr: str) -> Done:
        """Run `kdtrain WORDS` to its end."""
        return Done(f"kdtrain {' '.join(words)}", code, stdout, stderr)

    def install(self, package: Path, *groups: str) -> str:
        """Install a package of one file, which registers its name in these groups; return the folder for PYTHONPATH."""
        folder, name = self.root / "packages", package.stem
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        shutil.copy2(package, folder)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("".join(f"[kdtrain.{each}]\n{name} = {name}\n" for each in groups))
        return str(folder)

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """Return the lines of a run's metrics.jsonl that are about training steps."""
        return [line for line in self.lines(run) if "loss" in line]

    def lines(self, run: str) -> list[dict[str, Any]]:
        """Return all lines of a run's metrics.jsonl."""
        return [json.loads(line) for line in (self.root / run / "metrics.jsonl").read_text().splitlines()]

    def newest(self, run: str) -> Path:
        """Return the folder of a run's newest checkpoint."""
        store = Store(self.root / run / "checkpoints")
        return store.path(store.names()[-1])

    def tensors(self, run: str) -> dict[str, torch.Tensor]:
        """Read the tensors of a run's newest checkpoint."""
        return load(self.newest(run)).tensors

    def differing(self, one: str, other: str) -> list[str]:
        """List the tensors that differ between the newest checkpoints of two runs, to the bit."""
        ours, theirs = self.tensors(one), self.tensors(other)
        both = ours.keys() & theirs.keys()
        return sorted(ours.keys() ^ theirs.keys()) + [
            each for each in both if not torch.equal(ours[each], theirs[each])
        ]

    def state(self, run: str) -> dict[str, Any]:
        """Read the numbers of a run's newest checkpoint."""
        return json.loads((self.newest(run) / "state.json").read_text())

    def assert_same(self, run: str, other: str, validations: bool = True) -> None:
        """Assert that the newest checkpoints are equal bit by bit, and that each step was logged once, alike."""
        assert self.newest(run).name == self.newest(other).name
        assert self.differing(run, other) == []
        assert untimed(self.metrics(run)) == untimed(self.metrics(other))
        if validations:
            assert untimed(self.lines(run)) == untimed(self.lines(other))
            assert self.state(run)["progress"] == self.state(other)["progress"]
            best = [(self.root / each / "checkpoints/best").resolve().name for each in (run, other)]
            assert best[0] == best[1]

    def student(self, name: str, shape: str = "llama", tokenizer: str = "teacher", **config: Any) -> Path:
        """Write the spec of a random student."""
        entries = [f"{key} = {json.dumps(value)}\n" for key, value in (SHAPES[shape] | config).items()]
        path = self.root / f"{name}.toml"
        path.write_text(f"tokenizer = '{tokenizer}'\n\n[config]\n{''.join(entries)}")
        return path


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove times from lines, and averages over the steps of one process."""
    return [{name: value for name, value in line.items() if name not in _TIMING} for line in lines]


def _program() -> Path:
    return Path(kdtrain.__file__).with_name("__main__.py")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, server: Any) -> Bench:
    """Make the models, specs and text of each bench."""
    made = Bench(tmp_path_factory.mktemp("made"), server)
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
        "cache-teacher", "--teacher", "teacher", "--out", "cache", *Bench.small, "--top-k", 12, "--json"
    ).ok()


@pytest.fixture(scope="session")
def _run(made: Bench, _cache: Done) -> Done:
    return made.alone(
        *("distill", "--cache", "cache", "--student", "student.toml", "--out", "run", "--steps", 8, "--lr", 1e-2),
        *("--warmup-steps", 2, "--batch-size", 8, "--checkpoint-freq", 4, "--eval-freq", 4, "--json"),
        *("--no-compile", "--precision", "fp32", "--log-freq", 1, "--alpha", 0.9),
    ).ok()


@pytest.fixture(scope="module")
def bench(made: Bench, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Copy models, specs and text to a folder for each file of tests; nothing is trained yet."""
    root = tmp_path_factory.mktemp("bench")
    for name in ("teacher", "corpus"):
        shutil.copytree(made.root / name, root / name)
    for path in (*made.root.glob("*.toml"), made.root / "chat.jsonl"):
        shutil.copy2(path, root)
    return Bench(root, made.server)


@pytest.fixture(scope="module")
def cached(bench: Bench, made: Bench, _cache: Done) -> Done:
    """Copy `cache`: the teacher over the corpus, 12 entries a token."""
    shutil.copytree(made.root / "cache", bench.root / "cache")
    return _cache


@pytest.fixture(scope="module")
def distilled(bench: Bench, made: Bench, cached: Done, _run: Done) -> Done:
    """Copy `run`: the student after 8 steps from `cache`, with checkpoints at 4 and 8."""
    shutil.copytree(made.root / "run", bench.root / "run", symlinks=True)
    return _run


@pytest.fixture(scope="module")
def forks(bench: Bench, cached: Done) -> Bench:
    """Return the bench with its cache."""
    return bench


@pytest.fixture(scope="module")
def ranks_of(bench: Bench) -> Bench:
    """Return the bench, for commands in several ranks."""
    return bench


def opinionated(model: torch.nn.Module) -> torch.nn.Module:
    """Enlarge the matrices of `model`, so that its distributions are far from even."""
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
    """Write conversations of very uneven lengths, so that micro-batches differ in the tokens that count."""
    with open(path, "w") as file:
        for number in range(60):
            question, answer = "why? " * (number * 7 % 19), "because. " * (number * 5 % 11 + 1)
            turns = [{"role": "user", "content": question or "?"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
