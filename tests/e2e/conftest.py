"""A bench for the real command: tiny models and text in a folder, and `kdtrain` started in processes of its own.

Every process is the command as a user starts it, `python -m kdtrain ...`, in the folder of the bench. What costs
seconds is made once a session: a cache of the tiny teacher, and a student trained from it.
"""

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
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
        log = self.root / "fired"
        log.unlink(missing_ok=True)
        if fault:
            variables |= {"KDTRAIN_FAULT": fault, "KDTRAIN_FAULT_LOG": str(log)}
        ended = subprocess.run(
            [sys.executable, "-m", "kdtrain", *words],
            cwd=self.root,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if fault:
            fired = log.read_text().split() if log.exists() else []
            assert sorted(fired) == sorted(each.split(":")[0] for each in fault.split(",")), f"{fault} fired not once"
        return self.done(words, ended.returncode, ended.stdout, ended.stderr)

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


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Models, specs and text; nothing is trained yet."""
    bench = Bench(tmp_path_factory.mktemp("bench"))
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = _CHAT
    write_model_folder(bench.root / "teacher", opinionated(tiny_model("llama", 300, seed=1)), tokenizer)
    bench.student("student", num_hidden_layers=1)
    bench.student("gpt2", "gpt2")
    bench.student("dropout", "gpt2", resid_pdrop=0.1)
    bench.student("qwen", "qwen3")
    _write_corpus(bench.root / "corpus")
    _write_chat(bench.root / "chat.jsonl")
    return bench


@pytest.fixture(scope="session")
def cached(bench: Bench) -> Done:
    """`cache`: the teacher over the corpus, 12 entries a token."""
    return bench.run(
        "cache-teacher", "--teacher", "teacher", "--out", "cache", *Bench.small, "--head", 12, "--json"
    ).ok()


@pytest.fixture(scope="session")
def distilled(bench: Bench, cached: Done) -> Done:
    """`run`: the student after 8 steps from `cache`, with checkpoints at 4 and 8."""
    return bench.run(
        *("distill", "--cache", "cache", "--student", "student.toml", "--out", "run", "--steps", 8, "--lr", 1e-2),
        *("--warmup-steps", 2, "--batch-size", 8, "--checkpoint-freq", 4, "--eval-freq", 4, "--json"),
        *("--no-compile", "--precision", "fp32", "--log-freq", 1),
    ).ok()


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
