"""Things that are not files: folders, pipes, sockets, devices, files that cannot be read, and empty ones."""

import os
import socket

from tests.hostile.case import COMMANDS, Cases, Place, curried, remove

_SHARD, _SIDECAR = "shards/train-00000.h5", "shards/train-00000.json"
CACHE = ("manifest.json", "settings.json", _SHARD, _SIDECAR, "tokenizer/tokenizer.json")
KINDS = ("folder", "pipe", "socket", "device", "unreadable", "broken", "empty")


def cases() -> Cases:
    """List cases of every object in every kind, the commands in turn."""
    found = Cases("types")
    for name in CACHE:
        for kind in KINDS:
            found.add(f"{name} is {kind}", "verify", _is(f"cache/{name}", kind), resealed=False)
        for kind in ("folder", "pipe", "unreadable", "broken"):
            found.add(f"{name} is {kind}", "repair", _is(f"cache/{name}", kind), resealed=False)
    for name in ("manifest.json", _SHARD, "tokenizer/tokenizer.json"):
        for kind in ("folder", "pipe", "device", "unreadable"):
            found.add(f"{name} is {kind}", "distill", _is(f"cache/{name}", kind), resealed=False)
    for name in ("settings.json", _SIDECAR, "tokenizer"):
        for kind in ("pipe", "device", "unreadable"):
            found.add(f"unfinished, {name} is {kind}", "finish", _is(f"unfinished/{name}", kind), ends="either")
    for name in ("shards", "tokenizer"):
        for kind in ("pipe", "empty", "unreadable"):
            found.add(f"{name} is {kind}", "repair", _is(f"cache/{name}", kind), resealed=False)
    _runs(found)
    _models(found)
    return found


@curried
def _is(place: Place, name: str, kind: str) -> None:
    """Make `name` a thing of another kind."""
    path = place.path(name)
    if kind == "unreadable":
        path.chmod(0)
        return
    remove(path)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        parent = os.open(path.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{parent}/{path.name}")  # the name of a socket is short
        os.close(parent)
    elif kind == "empty":
        path.touch()
    else:  # a read of /proc/self/mem at 0 ends in an input/output error
        path.symlink_to({"device": "/dev/zero", "broken": "/proc/self/mem"}[kind])


def _runs(found: Cases) -> None:
    newest = "run/checkpoints/step-00000004"
    objects = (
        *("run/config.toml", "run/environment.json", "run/metrics.jsonl", "run/events.jsonl", "run/train.log"),
        *("run/checkpoints", newest, f"{newest}/state.json", f"{newest}/manifest.json"),
        f"{newest}/shard-00001-00001.safetensors",
    )
    commands = ("inspect run", "resume", "export", "verify run")
    for number, name in enumerate(objects):
        for offset, kind in enumerate(("folder", "pipe", "device", "unreadable")):
            command = commands[(number + offset) % len(commands)]
            found.add(f"{name} is {kind}", command, _is(name, kind), ends="either", resealed=False)
    for name in ("metrics.jsonl", "events.jsonl", "train.log", ".training"):
        for kind in ("pipe", "device"):
            if (name, kind) not in (("events.jsonl", "device"), ("train.log", "pipe")):  # are above
                found.add(f"run/{name} is {kind}", "resume", _made(f"run/{name}", kind), ends="either")
    for name in ("latest", "best"):
        for kind in ("folder", "empty", "pipe"):
            command = "resume" if name == "latest" else "export"
            found.add(f"{name} is {kind}", command, _is(f"run/checkpoints/{name}", kind), ends="either")
    found.add("latest is folder", COMMANDS["distill"], _new_latest, writes=("new",))


def _new_latest(place: Place) -> None:
    place.path("new/checkpoints/latest").mkdir(parents=True)


def _models(found: Cases) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors", "generation_config.json"):
        for kind in ("folder", "pipe", "device", "unreadable"):
            optional = "either" if name in ("generation_config.json", "tokenizer.json") else "refused"
            found.add(f"model's {name} is {kind}", "model", _is(f"model/{name}", kind), ends=optional)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        for kind in ("folder", "pipe", "device"):
            found.add(f"teacher's {name} is {kind}", "build", _is(f"teacher/{name}", kind), ends="either")
    for kind in ("folder", "pipe", "device", "unreadable", "empty"):
        found.add(f"student.toml is {kind}", "distill", _is("student.toml", kind))
        with_config = (*COMMANDS["distill"], "--config", "options.toml")
        ends = "works" if kind == "empty" else "refused"
        found.add(f"--config is {kind}", with_config, _made("options.toml", kind), ends=ends)
        found.add(f"logprobs.jsonl is {kind}", "logprobs", _is("logprobs.jsonl", kind))
        found.add(f"--data jsonl is {kind}", "chat", _is("chat.jsonl", kind))
    for kind in ("pipe", "device", "unreadable", "broken"):
        found.add(f"corpus/a.txt is {kind}", "build", _is("corpus/a.txt", kind), ends="either")
    for kind in ("pipe", "device", "empty"):
        found.add(f"--out is {kind}", "build", _made("new", kind), writes=())
        found.add(f"--out is {kind}", "distill", _made("new", kind), writes=())
        found.add(f"--out is {kind}", "export", _made("new", kind), writes=())


@curried
def _made(place: Place, name: str, kind: str) -> None:
    place.write(name, "")
    _is(name, kind)(place)
