"""Environments: variables of launchers and libraries, closed streams, limits, folders that cannot be written."""

import itertools
import os
from collections.abc import Callable
from typing import Any

from tests.hostile.case import COMMANDS, Cases, Place, curried, in_cache, remove

Variables = dict[str, str | None]
_MASTER = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
_RANKS: dict[str, Variables] = {
    "RANK=x": {"RANK": "x", "WORLD_SIZE": "2"},
    "RANK=x alone": {"RANK": "x"},
    "RANK=": {"RANK": "", "WORLD_SIZE": "2"},
    "RANK=-1": {"RANK": "-1", "WORLD_SIZE": "2"},
    "RANK=5 of 2": _MASTER | {"RANK": "5", "LOCAL_RANK": "0", "MASTER_PORT": "29511"},
    "WORLD_SIZE=0": {"RANK": "0", "WORLD_SIZE": "0"},
    "WORLD_SIZE=0 alone": {"WORLD_SIZE": "0"},
    "WORLD_SIZE=-1": {"RANK": "0", "WORLD_SIZE": "-1"},
    "WORLD_SIZE=x": {"RANK": "0", "WORLD_SIZE": "x"},
    "WORLD_SIZE=1.5": {"RANK": "0", "WORLD_SIZE": "1.5"},
    "WORLD_SIZE=2 alone": {"WORLD_SIZE": "2"},
    "no MASTER_ADDR": {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    "MASTER_PORT=x": _MASTER | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "x"},
    "MASTER_PORT=99999": _MASTER | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "99999"},
    "LOCAL_RANK=x": _MASTER | {"RANK": "0", "LOCAL_RANK": "x", "MASTER_PORT": "29512"},
}
_HARMLESS: dict[str, Variables] = {
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
_COLD: dict[str, Variables] = {
    "PYTHONIOENCODING=ascii": {"PYTHONIOENCODING": "ascii"},
    "LC_ALL=nonsense": {"LC_ALL": "no_SUCH.locale"},
    "HF_HOME is a file": {"HF_HOME": "/dev/null"},
}


def cases() -> Cases:
    """List cases of the environment that the command finds around it."""
    found = Cases("environments")
    for number, (name, environment) in enumerate(_RANKS.items()):
        for command in ("distill", "build") if number < 2 else (("distill", "build")[number % 2],):
            words = (*COMMANDS[command], "--rank-timeout", "5")
            ends = "either" if name.endswith("alone") else "refused"
            found.add(name, words, environment=environment, ends=ends, says="RANK|WORLD|MASTER|rank|torchrun")
    for name, environment in _HARMLESS.items():
        command = ("distill", "inspect")[len(name) % 2]
        found.add(name, command, environment=environment, ends="works")
    for name, environment in _COLD.items():
        found.add(name, "distill", environment=environment, cold=True, ends="works")
    umlaut, ascii_only = in_cache("settings", "teacher.spec", "Fräulein"), {"PYTHONIOENCODING": "ascii"}
    found.add("a word that ASCII lacks", "inspect", umlaut, environment=ascii_only, cold=True, ends="works")
    _folders(found)
    _streams(found)
    return found


def _folders(found: Cases) -> None:
    text = ("evaluate", "--student", "model", "--data", "corpus", "--seq-len", "32", "--num-sequences", "4", "--json")
    found.add("TMPDIR is not there", text, environment={"TMPDIR": "/no/such/folder"}, ends="either")
    found.add("TMPDIR cannot be written", text, _mode("../tmp", 0o555), ends="either")
    folders = (*((each, ".") for each in ("distill", "build", "export")), ("resume", "run"), ("finish", "unfinished"))
    for command, name in folders:
        found.add(f"{name} cannot be written", command, _mode(name, 0o555))
    for command, name in (("resume", "run/checkpoints"), ("finish", "unfinished/shards"), ("repair", "cache/shards")):
        found.add(f"{name} cannot be written", command, _damaged(name, 0o555), ends="either")
    searched = ("cache", "cache/shards", "cache/tokenizer", "run/checkpoints")
    for command, name in zip(("verify", "inspect", "distill", "export"), searched, strict=True):
        ends = "either" if command in ("inspect", "distill") else "refused"
        found.add(f"{name} cannot be searched", command, _mode(name, 0), ends=ends)
    found.add("umask of 777", "distill", how={"umask": 0o777}, ends="either")
    found.add("umask of 777", "build", how={"umask": 0o777}, ends="either")


def _mode(name: str, mode: int) -> Callable[[Place], None]:
    return lambda place: os.chmod(place.path(name), mode)


@curried
def _damaged(place: Place, name: str, mode: int) -> None:
    if name.startswith("cache"):
        remove(place.path("cache/shards/train-00001.json"))
    os.chmod(place.path(name), mode)


def _streams(found: Cases) -> None:
    streams: list[tuple[str, dict[str, Any], str]] = [
        ("stdout is full", {"stdout": "/dev/full"}, "refused"),
        ("stderr is full", {"stderr": "/dev/full"}, "either"),
        ("stdin is closed", {"closed": [0]}, "works"),
        ("stdout is closed", {"closed": [1]}, "either"),
        ("stderr is closed", {"closed": [2], "stderr": "/dev/null"}, "either"),
    ]
    limits = [(f"{number} open files at most", {"nofile": number}, "either") for number in (24, 48)]
    full = [("files of 10,000 bytes at most", {"fsize": 10_000}, "refused")]
    of = ("inspect", "distill", "verify"), ("distill", "build", "evaluate"), ("distill", "build", "export")
    for commands, rows in zip(of, (streams, limits, full), strict=True):
        for command, (name, how, ends) in itertools.product(commands, rows):
            found.add(name, command, how=how, ends=ends)
