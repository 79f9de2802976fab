"""Names: paths out of the folder, absolute, endless, with control characters; in files and on the command line."""

from typing import Any

from tests.hostile.case import (
    COMMANDS,
    Attack,
    Cases,
    Place,
    changed,
    curried,
    in_cache,
    in_sealed,
    put,
    spec_with,
    words,
)
from tests.hostile.shapes import CHECKPOINT, header_of, in_tensors

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
    """List cases of names in manifests of caches and checkpoints, indices of weights, specs and options."""
    found = Cases("names")
    for number, (kind, name) in enumerate(PATHS.items()):
        shard = name.replace("letter.txt", "shards/train-00000")
        one, other = ("verify", "repair")[:: 1 - 2 * (number % 2)]
        listed = in_cache("manifest", ("tokenizer_files", name), "0" * 64)
        found.add(f"tokenizer file {kind}", "repair", listed, resealed=False, ends="either")
        in_manifest = in_cache("manifest", "splits.train.shards.0.name", shard)
        found.add(f"shard {kind}", one, in_manifest, resealed=False)
        sidecar = in_sealed("cache/shards/train-00000.json", "name", shard)
        found.add(f"sidecar's shard {kind}", other, sidecar, resealed=False, ends="either")
        found.add(f"shard {kind}", "distill", in_manifest, resealed=False)
        found.add(f"split {kind}", "verify", changed("manifest", _split(name)), resealed=False, ends="either")
        found.add(f"teacher {kind}", "inspect", in_cache("settings", "teacher.spec", name), ends="either")
        command = ("verify checkpoint", "export")[number % 2]
        found.add(f"checkpoint's file {kind}", command, _checkpoint(name), resealed=False, ends="either")
        found.add(f"tensor {kind}", "export", in_tensors(CHECKPOINT, _first_is(f"student.{name}")), ends="either")
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
        student = words("model", "--student", f"./{name}")
        found.add(f"a model folder called {name[:20]!r}", student, _renamed("model", name), ends="works")
        text = _renamed("corpus/a.txt", f"corpus/{name[:240]}.txt")
        found.add(f"text called {name[:20]!r}", "build", text, ends="works")
    return found


@curried
def _template(place: Place, name: str) -> None:
    """Add a named chat template to the teacher's tokenizer."""
    place.path("teacher/chat_template.jinja").unlink(missing_ok=True)
    with place.json("teacher/tokenizer_config.json") as content:
        content["chat_template"] = [{"name": "default", "template": "a"}, {"name": name, "template": "b"}]


@curried
def _renamed(place: Place, name: str, other: str) -> None:
    place.path(name).rename(place.path(other))


def _split(name: str) -> Any:
    return lambda record: record["splits"].update({name: record["splits"].pop("train")})


@curried
def _checkpoint(place: Place, name: str) -> None:
    place.seal_run(lambda manifest: put(manifest, ("files", name), [0, "0" * 64]))


def _first_is(name: str) -> Any:
    """Give the first tensor of the student another name."""

    def change(header: dict[str, Any]) -> dict[str, Any]:
        first = next(each for each in header if each.startswith("student."))
        return {name if each == first else each: entry for each, entry in header.items()}

    return change


@curried
def _index(place: Place, name: str) -> None:
    """Split the weights in several files, and let an index say where they are."""
    path = place.path("model/model.safetensors")
    header, _ = header_of(path)
    path.rename(place.docs / "weights.safetensors")
    file = name.replace("letter.txt", "weights.safetensors")
    place.write("model/model.safetensors.index.json", "{}")
    with place.json("model/model.safetensors.index.json") as index:
        index |= {"metadata": {}, "weight_map": {each: file for each in header if each != "__metadata__"}}


def _spec(key: str, value: str) -> Attack:
    text = "".join(each if each.isprintable() and each not in '"\\' else f"\\u{ord(each):04x}" for each in value)
    more = ("init = 'teacher-layers'", "layers = [0]") if key == "teacher" else ()
    return spec_with(f'{key} = "{text}"', *more, config=key != "source")


_VALUES = (
    *("a" * 5_000, "~nosuchuser/x", "", "\udcff\udcfe", "a\nb", "\x1b[2J", "-", ".", "..", "nul/../x", "a/" * 2_000),
)
_FLAGS = (
    *(("distill", "--cache"), ("distill", "--student"), ("online", "--teacher"), ("plain", "--data")),
    *(("distill", "--out"), ("build", "--out"), ("export", "--out"), ("load", "--load"), ("logprobs", "--out")),
    *(("model", "--student"), ("distill", "--device"), ("resume", "--resume"), ("export", "--checkpoint")),
    *(("distill", "--config"), ("chat", "--messages-column")),
)


def _options(found: Cases) -> None:
    for number, (command, flag) in enumerate(_FLAGS):
        for offset, value in enumerate(_VALUES):
            if (number + offset) % 3:
                continue
            # a folder may be called almost anything
            ends = "either" if flag == "--out" else "refused"
            writes = (value,) if flag == "--out" and "\n" in value + "\n" and value not in (".", "..", "") else ()
            name = f"{flag} {value[:12]!r}{' and so on' if len(value) > 12 else ''}"
            found.add(name, words(command, flag, value), ends=ends, writes=writes)
    for command in ("inspect", "verify", "export"):
        for value in _VALUES:
            rest = ("--out", "new") if command == "export" else ()
            name = f"path {value[:12]!r}{' and so on' if len(value) > 12 else ''}"
            found.add(name, (command, value, *rest))
    for name, strange in _STRANGE.items():
        found.add(name, strange, writes=())


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
