"""One attack: what is done to a fresh copy of everything, which command is run on it, and what may come of that."""

import contextlib
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import h5py
import hdf5plugin  # noqa: F401  (registers the filters of a shard)

from tests.hostile import seal
from tests.hostile.base import BUILD, SPARSE, TRAIN

COMMANDS: dict[str, tuple[str, ...]] = {
    "verify": ("verify", "cache", "--json"),
    "repair": ("verify", "cache", "--repair", "--json"),
    "inspect": ("inspect", "cache", "--json"),
    "evaluate": ("evaluate", "--student", "model", "--cache", "cache", "--batch-size", "8", "--json"),
    "distill": ("distill", "--cache", "cache", "--student", "student.toml", "--out", "new", "--steps", "3", *TRAIN),
    "again": ("cache-teacher", "--teacher", "teacher", "--data", "corpus", "--out", "cache", *BUILD, *SPARSE),
    "finish": ("cache-teacher", "--teacher", "teacher", "--data", "corpus", "--out", "unfinished", *BUILD, *SPARSE),
    "build": ("cache-teacher", "--teacher", "teacher", "--data", "corpus", "--out", "new", *BUILD, *SPARSE),
    "chat": (
        *("cache-teacher", "--teacher", "teacher", "--data", "chat.jsonl", "--messages-column", "messages"),
        *("--out", "new", *BUILD, *SPARSE),
    ),
    "logprobs": (
        *("import", "logprobs.jsonl", "--layout", "prompt-logprobs", "--teacher", "t", "--tokenizer", "teacher"),
        *("--out", "new", "--seq-len", "32", "--top-k", "3"),
    ),
    "plain": (
        *("distill", "--data", "corpus", "--student", "student.toml", "--out", "new", "--seq-len", "32"),
        *("--steps", "3", "--validation-sequences", "8", *TRAIN),
    ),
    "online": (
        *("distill", "--data", "corpus", "--teacher", "teacher", "--student", "student.toml", "--out", "new"),
        *("--seq-len", "32", "--steps", "3", "--validation-sequences", "8", *TRAIN),
    ),
    "model": ("evaluate", "--student", "model", "--cache", "cache", "--batch-size", "8", "--json"),
    "verify run": ("verify", "run", "--json"),
    "inspect run": ("inspect", "run", "--json"),
    "evaluate run": ("evaluate", "--student", "run", "--cache", "cache", "--batch-size", "8", "--json"),
    "export": ("export", "run", "--out", "new", "--json"),
    "resume": ("distill", "--cache", "cache", "--student", "student.toml", "--out", "run", "--steps", "6", *TRAIN),
    "load": (
        *("distill", "--cache", "cache", "--student", "student.toml", "--out", "new", "--steps", "6", *TRAIN),
        *("--load", "run/checkpoints/step-00000004", "--override-opt-param-scheduler"),
    ),
    "inspect checkpoint": ("inspect", "run/checkpoints/step-00000004", "--json"),
    "verify checkpoint": ("verify", "run/checkpoints/step-00000004", "--json"),
}
"""Commands by what they do; names of files are those of `base.make`."""

MISSING = object()
"""The value of an entry that is removed."""


@dataclass(frozen=True)
class Many:
    """A value of a large number of parts, which is made where it is written: so many cases fit into no memory."""

    make: Callable[[int], Any]
    number: int


class Place:
    """A fresh copy of everything: `here` (where the command runs) between `docs`, `home` and `tmp`."""

    def __init__(self, root: Path, base: Path, seed: str) -> None:
        self.root, self.here, self.docs = root, root / "here", root / "docs"
        self.random = random.Random(seed)
        self.planted: list[Path] = []
        shutil.copytree(base, self.here, symlinks=True)
        for name in ("docs", "docs/shards", "docs/student", "home", "tmp", "empty"):
            (root / name).mkdir()
        for name in ("letter.txt", "shards/train-00000.h5", "shards/notes.json", "student/model.safetensors"):
            (self.docs / name).write_text(f"{name}: the only copy\n")
        (self.docs / "notes.json").write_text('{"the only": "copy"}\n')
        (root / "home" / ".profile").write_text("umask 022\n")

    def path(self, name: str) -> Path:
        """Return a path where the command runs."""
        return self.here / name

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file, in place of whatever is there."""
        path = self.path(name)
        remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))
        return path

    def plant(self, name: str, content: str = "the only copy\n") -> Path:
        """Write a file that is the user's own: it has to be there afterwards."""
        self.planted.append(self.write(name, content))
        return self.planted[-1]

    def link(self, name: str, target: str) -> None:
        """Put a symbolic link in place of whatever is there."""
        path = self.path(name)
        remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def twin(self, name: str) -> None:
        """Move a file or a folder out of here, and put a link to it in its place."""
        path, twin = self.path(name), self.root / "twin" / name
        twin.parent.mkdir(parents=True)
        path.rename(twin)
        path.symlink_to(twin)

    @contextlib.contextmanager
    def json(self, name: str) -> Iterator[Any]:
        """Open a JSON file for a change."""
        content = json.loads(self.path(name).read_text())
        yield content
        self.path(name).write_text(json.dumps(content, indent=1))

    @contextlib.contextmanager
    def shard(self, name: str = "train-00000", folder: str = "cache") -> Iterator[h5py.File]:
        """Open a shard for a change, and seal the cache again."""
        with h5py.File(self.path(f"{folder}/shards/{name}.h5"), "r+") as file:
            yield file
        seal.cache(self.path(folder))

    @contextlib.contextmanager
    def state(self, step: int = 4) -> Iterator[dict[str, Any]]:
        """Open the state.json of a checkpoint for a change; the run keeps its newest checkpoint alone, sealed again."""
        with self.json(f"run/checkpoints/step-0000000{step}/state.json") as content:
            yield content
        self.seal_run()

    def seal_run(self, manifest: seal.Edit | None = None) -> None:
        """Leave the run its newest checkpoint alone, so that no other is fallen back to, and seal it."""
        remove(self.path("run/checkpoints/step-00000002"))
        seal.checkpoint(self.path("run/checkpoints/step-00000004"), manifest)


def remove(path: Path) -> None:
    """Remove a file, link or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put(record: Any, where: str | tuple[str, str], value: Any) -> None:
    """Set the entry at `a.b.0.c`, or remove it where the value is `MISSING`; two names of any spelling as a pair."""
    names = where.split(".") if isinstance(where, str) else where
    *above, last = [int(each) if each.isdigit() and isinstance(where, str) else each for each in names]
    for each in above:
        record = record[each]
    if value is MISSING:
        record.pop(last, None)
    else:
        record[last] = value.make(value.number) if isinstance(value, Many) else value


Attack = Callable[[Place], None]
Given = ParamSpec("Given")


def curried(done: Callable[Concatenate[Place, Given], None]) -> Callable[Given, Attack]:
    """Turn a function of a place and arguments into a function of the arguments that gives an attack."""
    return lambda *given, **named: lambda place: done(place, *given, **named)


@curried
def wrote(place: Place, name: str, content: str | bytes) -> None:
    """Write a file."""
    place.write(name, content)


@curried
def in_json(place: Place, name: str, where: str, value: Any) -> None:
    """Set an entry of a JSON file, or remove it."""
    with place.json(name) as content:
        put(content, where, value)


@curried
def in_spec(place: Place, name: str, value: Any) -> None:
    """Set an option of the student's configuration in its spec."""
    lines = place.path("student.toml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(f"{name} =")]
    place.write("student.toml", "\n".join([*kept, f"{name} = {json.dumps(value)}"]) + "\n")


@curried
def spec_with(place: Place, *lines: str, config: bool = True) -> None:
    """Put lines in front of the student's spec, in place of lines with the same key.

    config: keep the student's configuration.
    """
    kept = place.path("student.toml").read_text().splitlines()
    kept = kept if config else kept[: kept.index("[config]")]
    keys = tuple(f"{line.split(' =')[0]} =" for line in lines)
    place.write("student.toml", "\n".join([*lines, *(each for each in kept if not each.startswith(keys))]) + "\n")


@curried
def in_cache(place: Place, record: str, where: str | tuple[str, str], value: Any) -> None:
    """Set an entry of the `manifest`, the `settings` or each `sidecar` of the cache, or remove it."""
    seal.cache(place.path("cache"), **{record: lambda content: put(content, where, value)})


@curried
def changed(place: Place, record: str, change: seal.Edit) -> None:
    """Change the `manifest`, the `settings` or each `sidecar` of the cache."""
    seal.cache(place.path("cache"), **{record: change})


@curried
def in_sealed(place: Place, name: str, where: str, value: Any) -> None:
    """Set an entry of one sealed record, and change nothing else of its cache."""
    with seal.record(place.path(name)) as record:
        put(record, where, value)


@curried
def in_state(place: Place, where: str, value: Any) -> None:
    """Set an entry of the state of a checkpoint, or remove it."""
    with place.state() as state:
        put(state, where, value)


@curried
def linked(place: Place, name: str, target: str) -> None:
    """Link to something beside the folder where the command runs."""
    place.link(name, str(place.root / target))


def nothing(place: Place) -> None:
    """Change nothing: all is sound."""


def words(command: str, flag: str, value: str | None = None) -> tuple[str, ...]:
    """Return a command without a flag that it has, or with another value for it, or with one more flag."""
    found = COMMANDS[command]
    at = found.index(flag) if flag in found else len(found)
    return (*found[:at], *([] if value is None else [f"{flag}={value}"]), *found[at + 2 :])


@dataclass(frozen=True, kw_only=True)
class Case:
    """An attack and the command that meets it."""

    family: str
    name: str
    attack: Attack
    argv: tuple[str, ...]
    ends: str = "refused"
    """`refused`: exit code 1 or 2 and one line; `works`: exit code 0; `either`: one of both."""
    same: bool = False
    """Exit code 0 is right only with the numbers of the sound cache and model."""
    finite: bool = True
    """Exit code 0 is right only with a loss that is a number."""
    says: str = ""
    """A regular expression that the line of a refusal has to match: which file, whose numbers."""
    writes: tuple[str, ...] | None = None
    """Where the command may write, relative to where it runs; by default what its `--out` or `--repair` names."""
    environment: dict[str, str | None] = field(default_factory=dict)
    cold: bool = False
    """In an interpreter of its own: what is attacked is read when libraries are imported."""
    how: dict[str, Any] = field(default_factory=dict)
    """Limits and streams, see `server._become`."""
    resealed: bool = True
    """A refusal because of a digest would be this harness's mistake."""

    @property
    def written(self) -> tuple[str, ...]:
        """The paths that the command may write."""
        if self.writes is not None:
            return self.writes
        if "--repair" in self.argv:
            return (self.argv[1],)
        return (self.argv[self.argv.index("--out") + 1],) if "--out" in self.argv[:-1] else ()

    def seed(self, seed: int) -> str:
        """Return the seed of this case's random numbers."""
        return hashlib.sha256(f"{seed} {self.family} {self.name}".encode()).hexdigest()


class Cases(list[Case]):
    """The cases of one family, as they are collected; `common`: what they have in common."""

    def __init__(self, family: str, **common: Any) -> None:
        super().__init__()
        self.common = {"family": family} | common

    def add(self, name: str, command: str | tuple[str, ...], attack: Attack = nothing, **more: Any) -> None:
        """Add a case: `command` is a name of `COMMANDS` or the words themselves."""
        argv = COMMANDS[command] if isinstance(command, str) else command
        shown = command if isinstance(command, str) else command[0]
        self.append(Case(name=f"{name}, {shown}", attack=attack, argv=argv, **self.common | more))
