"""A folder with a tiny teacher, its cache, and students; and the command called in this process.

Starting Python costs more than what these commands do. `tests/e2e` starts the real one.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdtrain import cli
from kdtrain.errors import log
from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder
from tests.web import TOKEN, Web, hurry, serving, with_hub

TEXT = "".join(f"{number} squared is {number * number}, and its half is {number / 2}.\n" for number in range(400))


class Workbench:
    """A folder in which commands are called."""

    text = ("--data", "text.txt", "--seq-len", 32, "--num-workers", 0, "--validation-sequences", 8)
    plain = ("--no-compile", "--precision", "fp32", "--log-to", "none", "--batch-size", 8)

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys

    def call(self, *argv: object) -> tuple[int, str, str]:
        """Run `kdtrain ARGV`; return its exit code, its stdout and its stderr."""
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in argv])
        return int(ended.value.code or 0), *self.capsys.readouterr()

    def json(self, *argv: object) -> Any:
        """Run a command that ends well; return the one object on its stdout."""
        code, out, err = self.call(*argv, "--json")
        assert code == 0, err
        return json.loads(out)

    def everything(self) -> dict[str, int]:
        """Return every path in the folder, and for files the time of the last write.

        In folders a lock may come and go.
        """
        paths = sorted(self.root.rglob("*"))
        return {str(path): path.stat().st_mtime_ns if path.is_file() else 0 for path in paths}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make `teacher`, `student.toml`, `text.txt` and `cache`."""
    root = tmp_path_factory.mktemp("workbench")
    teacher = tiny_model("llama", 300, seed=1)
    for parameter in teacher.parameters():
        parameter.data.mul_(6 if parameter.ndim > 1 else 1)
    write_model_folder(root / "teacher", teacher, tiny_tokenizer(300))
    entries = [f"{key} = {json.dumps(value)}\n" for key, value in SHAPES["llama"].items()]
    (root / "student.toml").write_text(f"tokenizer = 'teacher'\n\n[config]\n{''.join(entries)}")
    (root / "text.txt").write_text(TEXT)
    before = os.getcwd()
    os.chdir(root)
    words = ("cache-teacher", "--teacher", "teacher", "--out", "cache", "--num-sequences", 40, "--top-k", 12)
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in (*words, *Workbench.text, "--precision", "fp32")])
    os.chdir(before)
    assert ended.value.code == 0
    return root


@pytest.fixture
def workbench(made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Enter the folder of the workbench."""
    monkeypatch.chdir(made)
    yield Workbench(made, capsys)
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """Serve a stand-in of the hub, to which the real client of this process goes."""
    with serving() as found:
        with_hub(found.url, tmp_path / "hf", monkeypatch)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("KDTRAIN_HOME", str(tmp_path / "home"))
        hurry(monkeypatch)
        yield found
