"""Names: paths out of the folder, absolute, endless, with control characters; in files and on the command line."""

from collections.abc import Callable
from typing import Any

from tests.hostile import seal
from tests.hostile.case import COMMANDS, Cases, Place, curried
from tests.hostile.shapes import header_of, write_safetensors

PATHS = {
    "up and out": "../docs/letter.txt",
    "further out": "../../docs/letter.txt",
    "absolute": "/etc/passwd",
    "the manifest": "../manifest.json",
    "with a zero byte": "a\0b",
    "with escapes": "\x1b[2J\x07a",
    "of two lines": "a\nkdtrain: all is well",
    "of 5,000 characters": "a" * 5_000,
    "empty": "",
    "a dot": ".",
    "with a lone surrogate": "a\ud800",
    "right to left": "\u202etxt.a",
}
_TREE = ("..", "a/../../..", "./././..", "/", "//", "~", "~nosuchuser/x", "$HOME")


def cases() -> Cases:
    """Manifests of caches and checkpoints, indices of weights, specs, options."""
    found = Cases("names")
    for number, (kind, name) in enumerate(PATHS.items()):
        shard = name.replace("letter.txt", "shards/train-00000")
        one, other = ("verify", "repair")[:: 1 - 2 * (number % 2)]
        found.add(f"tokenizer file {kind}", "repair", _manifest(_tokenizer_file(name)), resealed=False, ends="either")
        found.add(f"shard {kind}", one, _manifest(_shard(shard)), resealed=False)
        found.add(f"sidecar's shard {kind}", other, _sidecar(shard), resealed=False, ends="either")
        found.add(f"shard {kind}", "distill", _manifest(_shard(shard)), resealed=False)
        found.add(f"split {kind}", "verify", _manifest(_split(name)), resealed=False, ends="either")
        found.add(f"teacher {kind}", "inspect", _settings(_told(name)), ends="either")
        command = ("verify checkpoint", "export")[number % 2]
        found.add(f"checkpoint's file {kind}", command, _checkpoint(name), resealed=False, ends="either")
        found.add(f"tensor {kind}", "export", _tensor(name), ends="either")
        found.add(f"chat template {kind}", "build", _template(name))
        if "\ud800" not in name:
            found.add(f"weights' file {kind}", "model", _index(name))
            found.add(f"spec's source {kind}", "distill", _spec("source", name))
            found.add(f"spec's tokenizer {kind}", "distill", _spec("tokenizer", name))
            found.add(f"student's name {kind}", "distill", _spec("name", name), ends="either")
    for number, name in enumerate(_TREE):
        for key in ("source", "tokenizer", "teacher")[number % 2 :]:
            found.add(f"spec's {key} {name}", "distill", _spec(key, name))
    _options(found)
    for name in ("-", "--json", "a b", "ä", "\x1b[2J", "a\nb", "'", "a" * 250):
        words = _with("model", "--student", f"./{name}")
        found.add(f"a model folder called {name[:20]!r}", words, _called(name), ends="works")
        found.add(f"text called {name[:20]!r}", "build", _text_called(name), ends="works")
    return found


@curried
def _template(place: Place, name: str) -> None:
    """A named chat template of the teacher's tokenizer."""
    place.path("teacher/chat_template.jinja").unlink(missing_ok=True)
    with place.json("teacher/tokenizer_config.json") as content:
        content["chat_template"] = [{"name": "default", "template": "a"}, {"name": name, "template": "b"}]


def _manifest(change: seal.Edit) -> Callable[[Place], None]:
    return lambda place: seal.cache(place.path("cache"), manifest=change)


def _settings(change: seal.Edit) -> Callable[[Place], None]:
    return lambda place: seal.cache(place.path("cache"), settings=change)


def _tokenizer_file(name: str) -> seal.Edit:
    return lambda record: record["tokenizer_files"].update({name: "0" * 64})


def _shard(name: str) -> seal.Edit:
    return lambda record: record["splits"]["train"]["shards"][0].update(name=name)


def _split(name: str) -> seal.Edit:
    return lambda record: record["splits"].update({name: record["splits"].pop("train")})


def _told(name: str) -> seal.Edit:
    return lambda record: record["teacher"].update(spec=name)


@curried
def _sidecar(place: Place, name: str) -> None:
    with seal.record(place.path("cache/shards/train-00000.json")) as record:
        record["name"] = name


def _checkpoint(name: str) -> Callable[[Place], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = [0, "0" * 64]

    return lambda place: place.seal_run(change)


@curried
def _tensor(place: Place, name: str) -> None:
    path = place.path("run/checkpoints/step-00000004/shard-00001-00001.safetensors")
    header, data = header_of(path)
    first = next(each for each in header if each.startswith("student."))
    header = {f"student.{name}" if each == first else each: entry for each, entry in header.items()}
    write_safetensors(path, header, data)
    place.seal_run()


@curried
def _index(place: Place, name: str) -> None:
    """Weights in several files, of which the index says where they are."""
    path = place.path("model/model.safetensors")
    header, _ = header_of(path)
    path.rename(place.docs / "weights.safetensors")
    file = name.replace("letter.txt", "weights.safetensors")
    place.write("model/model.safetensors.index.json", "{}")
    with place.json("model/model.safetensors.index.json") as index:
        index |= {"metadata": {}, "weight_map": {each: file for each in header if each != "__metadata__"}}


def _spec(key: str, value: str) -> Callable[[Place], None]:
    text = "".join(each if each.isprintable() and each not in '"\\' else f"\\u{ord(each):04x}" for each in value)

    def attack(place: Place) -> None:
        lines = place.path("student.toml").read_text().splitlines()
        kept = [line for line in lines if not line.startswith(f"{key} =")]
        if key == "source":
            kept = kept[: kept.index("[config]")]
        if key == "teacher":
            kept = ["init = 'teacher-layers'", "layers = [0]", *kept]
        place.write("student.toml", "\n".join([f'{key} = "{text}"', *kept]) + "\n")

    return attack


@curried
def _called(place: Place, name: str) -> None:
    place.path("model").rename(place.path(name))


@curried
def _text_called(place: Place, name: str) -> None:
    place.path("corpus/a.txt").rename(place.path(f"corpus/{name[:240]}.txt"))


_VALUES = (
    *("a" * 5_000, "~nosuchuser/x", "", "\udcff\udcfe", "a\nb", "\x1b[2J", "-", ".", "..", "nul/../x", "a/" * 2_000),
)
_FLAGS = (
    *(("distill", "--cache"), ("distill", "--student"), ("online", "--teacher"), ("plain", "--data")),
    *(("distill", "--out"), ("build", "--out"), ("export", "--out"), ("load", "--load"), ("logprobs", "--out")),
    *(("model", "--student"), ("distill", "--device"), ("resume", "--resume"), ("export", "--checkpoint")),
    *(("distill", "--config"), ("chat", "--messages-column")),
)


def _with(command: str, flag: str, value: str) -> tuple[str, ...]:
    """A command with another value for a flag it has, or one more flag."""
    words = COMMANDS[command]
    if flag not in words:
        return (*words, f"{flag}={value}")
    position = words.index(flag)
    return (*words[:position], f"{flag}={value}", *words[position + 2 :])


def _options(found: Cases) -> None:
    for number, (command, flag) in enumerate(_FLAGS):
        for offset, value in enumerate(_VALUES):
            if (number + offset) % 3:
                continue
            # a folder may be called almost anything
            ends = "either" if flag == "--out" else "refused"
            writes = (value,) if flag == "--out" and "\n" in value + "\n" and value not in (".", "..", "") else ()
            name = f"{flag} {value[:12]!r}{' and so on' if len(value) > 12 else ''}"
            found.add(name, _with(command, flag, value), _nothing, ends=ends, writes=writes)
    for command in ("inspect", "verify", "export"):
        for value in _VALUES:
            rest = ("--out", "new") if command == "export" else ()
            name = f"path {value[:12]!r}{' and so on' if len(value) > 12 else ''}"
            found.add(name, (command, value, *rest), _nothing)
    for name, words in _STRANGE.items():
        found.add(name, words, _nothing, writes=())


_STRANGE: dict[str, tuple[str, ...]] = {
    "no such command": ("a" * 5_000,),
    "a command of escapes": ("\x1b[2J",),
    "a flag of 5,000 characters": (*COMMANDS["distill"], "--" + "a" * 5_000),
    "a flag of escapes": (*COMMANDS["distill"], "--\x1b[2J"),
    "a million steps of text": (*COMMANDS["distill"][:-1], "--steps", "9" * 5_000),
    "a seed of 100 digits": (*COMMANDS["distill"], "--seed", "9" * 100),
    "a rate of 1e400": (*COMMANDS["distill"], "--lr", "1e400"),
    "a batch of 10^18": (*COMMANDS["distill"], "--batch-size", "1" + "0" * 18),
    "10,000 words": (*COMMANDS["distill"], *["word"] * 10_000),
    "a value of surrogates": (*COMMANDS["distill"], "--tail", "\udcff"),
}


def _nothing(place: Place) -> None:
    pass
