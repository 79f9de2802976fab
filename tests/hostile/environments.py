"""Environments: variables of launchers and libraries, closed streams, limits, folders that cannot be written."""

import os
from collections.abc import Callable

from tests.hostile.case import COMMANDS, Cases, Place, curried, remove

_RANKS: dict[str, dict[str, str | None]] = {
    "RANK=x": {"RANK": "x", "WORLD_SIZE": "2"},
    "RANK=x alone": {"RANK": "x"},
    "RANK=": {"RANK": "", "WORLD_SIZE": "2"},
    "RANK=-1": {"RANK": "-1", "WORLD_SIZE": "2"},
    "RANK=5 of 2": {
        "RANK": "5",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    },
    "WORLD_SIZE=0": {"RANK": "0", "WORLD_SIZE": "0"},
    "WORLD_SIZE=0 alone": {"WORLD_SIZE": "0"},
    "WORLD_SIZE=-1": {"RANK": "0", "WORLD_SIZE": "-1"},
    "WORLD_SIZE=x": {"RANK": "0", "WORLD_SIZE": "x"},
    "WORLD_SIZE=1.5": {"RANK": "0", "WORLD_SIZE": "1.5"},
    "WORLD_SIZE=2 alone": {"WORLD_SIZE": "2"},
    "no MASTER_ADDR": {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    "MASTER_PORT=x": {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "x",
    },
    "MASTER_PORT=99999": {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "99999",
    },
    "LOCAL_RANK=x": {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "x",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29512",
    },
}
_HARMLESS: dict[str, dict[str, str | None]] = {
    "COLUMNS=x": {"COLUMNS": "x"},
    "COLUMNS=0": {"COLUMNS": "0"},
    "COLUMNS=-9": {"COLUMNS": "-9"},
    "TERM=nonsense": {"TERM": "no-such-terminal"},
    "no HOME": {"HOME": None},
    "HOME is not there": {"HOME": "/no/such/home"},
    "neither HOME nor KDTRAIN_HOME": {"HOME": None, "KDTRAIN_HOME": None},
    "neither can be written": {"HOME": "/proc/none", "KDTRAIN_HOME": None},
    "KDTRAIN_HOME cannot be written": {"KDTRAIN_HOME": "/dev/null/x"},
    "no PATH": {"PATH": None},
    "TZ=x": {"TZ": "no/such/zone"},
    "CUDA_VISIBLE_DEVICES=x": {"CUDA_VISIBLE_DEVICES": "x"},
    "TORCHELASTIC_RESTART_COUNT=x": {"TORCHELASTIC_RESTART_COUNT": "x", "TORCHELASTIC_RUN_ID": "a"},
    "TORCHELASTIC_ERROR_FILE is a folder": {"TORCHELASTIC_ERROR_FILE": "/tmp"},
}
_COLD: dict[str, dict[str, str | None]] = {
    "PYTHONIOENCODING=ascii": {"PYTHONIOENCODING": "ascii"},
    "LC_ALL=nonsense": {"LC_ALL": "no_SUCH.locale"},
    "HF_HOME is a file": {"HF_HOME": "/dev/null"},
}


def cases() -> Cases:
    """What the command finds around it."""
    found = Cases("environments")
    for number, (name, environment) in enumerate(_RANKS.items()):
        for command in ("distill", "build") if number < 2 else (("distill", "build")[number % 2],):
            words = (*COMMANDS[command], "--rank-timeout", "5")
            found.add(
                name,
                words,
                _nothing,
                environment=environment,
                ends=_alone(name),
                says="RANK|WORLD|MASTER|rank|torchrun",
            )
    for name, environment in _HARMLESS.items():
        command = ("distill", "inspect")[len(name) % 2]
        found.add(name, command, _nothing, environment=environment, ends="works")
    for name, environment in _COLD.items():
        found.add(name, "distill", _nothing, environment=environment, cold=True, ends="works")
    found.add(
        "a word that ASCII lacks",
        "inspect",
        _umlaut,
        environment={"PYTHONIOENCODING": "ascii"},
        cold=True,
        ends="works",
    )
    _folders(found)
    _streams(found)
    return found


def _alone(name: str) -> str:
    return "either" if name.endswith("alone") else "refused"


def _nothing(place: Place) -> None:
    pass


def _umlaut(place: Place) -> None:
    from hostile import seal

    seal.cache(place.path("cache"), settings=lambda record: record["teacher"].update(spec="Fräulein"))


def _folders(found: Cases) -> None:
    text = ("evaluate", "--student", "model", "--data", "corpus", "--seq-len", "32", "--num-sequences", "4", "--json")
    found.add("TMPDIR is not there", text, _nothing, environment={"TMPDIR": "/no/such/folder"}, ends="either")
    found.add("TMPDIR cannot be written", text, _mode("../tmp", 0o555), ends="either")
    for command, name in (
        ("distill", "."),
        ("build", "."),
        ("export", "."),
        ("resume", "run"),
        ("finish", "unfinished"),
    ):
        found.add(f"{name} cannot be written", command, _mode(name, 0o555))
    for command, name in (("resume", "run/checkpoints"), ("finish", "unfinished/shards"), ("repair", "cache/shards")):
        found.add(f"{name} cannot be written", command, _damaged(name, 0o555), ends="either")
    for command, name in (
        ("verify", "cache"),
        ("inspect", "cache/shards"),
        ("distill", "cache/tokenizer"),
        ("export", "run/checkpoints"),
    ):
        ends = "either" if command in ("inspect", "distill") else "refused"
        found.add(f"{name} cannot be searched", command, _mode(name, 0), ends=ends)
    found.add("umask of 777", "distill", _nothing, how={"umask": 0o777}, ends="either")
    found.add("umask of 777", "build", _nothing, how={"umask": 0o777}, ends="either")


def _mode(name: str, mode: int) -> Callable[[Place], None]:
    return lambda place: os.chmod(place.path(name), mode)


@curried
def _damaged(place: Place, name: str, mode: int) -> None:
    if name.startswith("cache"):
        remove(place.path("cache/shards/train-00001.json"))
    os.chmod(place.path(name), mode)


def _streams(found: Cases) -> None:
    for command in ("inspect", "distill", "verify"):
        found.add("stdout is full", command, _nothing, how={"stdout": "/dev/full"})
        found.add("stderr is full", command, _nothing, how={"stderr": "/dev/full"}, ends="either")
        found.add("stdin is closed", command, _nothing, how={"closed": [0]}, ends="works")
        found.add("stdout is closed", command, _nothing, how={"closed": [1]}, ends="either")
        found.add("stderr is closed", command, _nothing, how={"closed": [2], "stderr": "/dev/null"}, ends="either")
    for command in ("distill", "build", "evaluate"):
        found.add("24 open files at most", command, _nothing, how={"nofile": 24}, ends="either")
        found.add("48 open files at most", command, _nothing, how={"nofile": 48}, ends="either")
    for command in ("distill", "build", "export"):
        found.add("files of 10,000 bytes at most", command, _nothing, how={"fsize": 10_000})
