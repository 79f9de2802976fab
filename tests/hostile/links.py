"""Links where files are expected: symbolic ones, and those of HDF5 (external, soft, external storage, virtual)."""

from collections.abc import Callable

import h5py
import numpy as np

from tests.hostile.case import COMMANDS, Cases, Place, curried, linked

CACHE = (
    *("manifest.json", "settings.json", "index.h5", "shards", "shards/train-00000.h5", "shards/train-00000.json"),
    *("tokenizer", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"),
)
CHECKPOINT = ("manifest.json", "state.json", "shard-00001-00001.safetensors")
DATASETS = ("tokens", "loss_mask", "segments", "ids", "numbers", "dictionary/common", "dictionary/candidates")
_NONE = "../no such file"
_TARGETS = {"": "docs", "shards": "docs/shards", "tokenizer": "docs", "student": "docs/student"}


def cases() -> Cases:
    """List cases of links in caches, shards, runs, checkpoints, exports, model folders and text."""
    found = Cases("links")
    _caches(found)
    _shards(found)
    _runs(found)
    _published(found)
    _outputs(found)
    return found


@curried
def away(place: Place, name: str) -> None:
    """Replace a file or folder by a link to one of the user's own."""
    path = place.path(name)
    target = _TARGETS.get(path.name, "docs") if path.is_dir() else "docs/letter.txt"
    place.link(name, str(place.root / target))


@curried
def _to(place: Place, name: str, target: str) -> None:
    """Replace a name by a link to a target, relative to the name's folder."""
    place.link(name, target)


@curried
def twin(place: Place, name: str, damaged: str = "") -> None:
    """Replace a name by a link to the same content elsewhere; the file `damaged` behind the link is cut short."""
    if damaged:
        path = place.path(damaged)
        path.write_bytes(path.read_bytes()[:-9])
    place.twin(name)


def _caches(found: Cases) -> None:
    damaged = {"shards": "cache/shards/train-00000.h5", "tokenizer": "cache/tokenizer/tokenizer.json"}
    for name in CACHE:
        file = f"cache/{name}"
        found.add(f"{name} to the user's", "repair", away(file), resealed=False)
        found.add(
            f"{name} to nothing", ("repair", "verify")[len(name) % 2], _to(file, "../no such file"), resealed=False
        )
        behind = damaged.get(name, file)
        found.add(f"{name} to its damaged self", "repair", twin(file, behind), resealed=False)
        found.add(f"{name} to the user's", "distill", away(file), resealed=False, ends=_unread(name))
        found.add(f"{name} to itself elsewhere", "evaluate", twin(file), ends="either", same=True)
        found.add(f"{name} to itself", "verify", _to(file, file.rpartition("/")[2]))
        found.add(f"{name} to the user's", "again", away(file), resealed=False, ends="either", writes=("cache",))
    folders = ("tokenizer", "tokenizer.tmp", "shards")
    for name in (*folders, "settings.json.tmp", ".building-0", "shards/train-00001.h5.tmp"):
        folder = name in folders
        for target in ("docs/shards" if name == "shards" else "docs" if folder else "docs/letter.txt", "empty/new"):
            attack = linked(f"unfinished/{name}", target)
            found.add(f"unfinished, {name} to {target}", "finish", attack, ends="either")


def _unread(name: str) -> str:
    """Return how training may end with this file: it does not need some files, and may read them or not."""
    return "either" if name in ("settings.json", "index.h5", "shards/train-00000.json") else "refused"


def _shards(found: Cases) -> None:
    links = (("external link", _external), ("soft link", _soft))
    for number, name in enumerate(DATASETS):
        for kind, attack in (*links, ("external storage", _raw), ("virtual", _virtual)):
            found.add(f"{name} as {kind}", ("evaluate", "distill")[number % 2], _in_shard(attack, name))
    for kind, attack in links:
        found.add(f"dictionary as {kind}", "evaluate", _in_shard(attack, "dictionary"))
        found.add(f"one more, {kind}", "distill", _in_shard(_more(attack), "tokens"))
        found.add(f"loop of {kind}s", "evaluate", _in_shard(_loop(kind == "soft link"), "ids"))


@curried
def _in_shard(place: Place, attack: Callable[[Place, h5py.File, str], None], name: str) -> None:
    """Attack a data set of the first shards of train and validation."""
    for shard in ("train-00000", "validation-00000"):
        with place.shard(shard) as file:
            attack(place, file, name)


def _secret(place: Place, file: h5py.File, name: str) -> str:
    """Make a file of the user's with a data set of the same name and shape."""
    path = place.docs / "secret.h5"
    with h5py.File(path, "a") as secret:
        if name not in secret:
            file.copy(name, secret, name)
    return str(path)


def _external(place: Place, file: h5py.File, name: str) -> None:
    path = _secret(place, file, name)
    del file[name]
    file[name] = h5py.ExternalLink(path, f"/{name}")


def _soft(place: Place, file: h5py.File, name: str) -> None:
    file.move(name, "elsewhere")
    file[name] = h5py.SoftLink("/elsewhere")


def _raw(place: Place, file: h5py.File, name: str) -> None:
    values = file[name][()]
    path = place.docs / f"{name.replace('/', '-')}.raw"
    path.write_bytes(np.ascontiguousarray(values).tobytes())
    del file[name]
    file.create_dataset(name, values.shape, values.dtype, external=[(str(path), 0, values.nbytes)])


def _virtual(place: Place, file: h5py.File, name: str) -> None:
    path, shape, dtype = _secret(place, file, name), file[name].shape, file[name].dtype
    layout = h5py.VirtualLayout(shape, dtype)
    layout[...] = h5py.VirtualSource(path, name, shape)
    del file[name]
    file.create_virtual_dataset(name, layout)


def _more(attack: Callable[[Place, h5py.File, str], None]) -> Callable[[Place, h5py.File, str], None]:
    def attacked(place: Place, file: h5py.File, name: str) -> None:
        file["more"] = file[name][()]
        attack(place, file, "more")

    return attacked


def _loop(soft: bool) -> Callable[[Place, h5py.File, str], None]:
    def attacked(place: Place, file: h5py.File, name: str) -> None:
        del file[name]
        file[name] = h5py.SoftLink(f"/{name}") if soft else h5py.ExternalLink(file.filename, f"/{name}")

    return attacked


def _runs(found: Cases) -> None:
    for command in ("inspect run", "verify run", "export", "resume", "evaluate run"):
        found.add("checkpoints to the user's", command, away("run/checkpoints"), ends="either", resealed=False)
    for name in ("latest", "best"):
        for target in ("../../../docs", "/", "../..", name, "../checkpoints/step-00000002"):
            command = {"latest": "resume", "best": "export"}[name]
            attack = _to(f"run/checkpoints/{name}", target)
            found.add(f"{name} to {target}", command, attack, ends="either", resealed=False)
    for name in CHECKPOINT:
        file = f"run/checkpoints/step-00000004/{name}"
        found.add(f"checkpoint's {name} to the user's", "inspect run", away(file), ends="either", resealed=False)
        found.add(f"checkpoint's {name} to itself elsewhere", "export", twin(file), ends="either")
        found.add(f"checkpoint's {name} to nothing", "resume", _to(file, _NONE), ends="either", resealed=False)
    found.add("checkpoint to itself elsewhere", "export", twin("run/checkpoints/step-00000004"), ends="either")
    found.add("checkpoint to itself elsewhere", "resume", twin("run/checkpoints/step-00000004"), ends="either")
    files = ("metrics.jsonl", "events.jsonl", "train.log", "environment.json", "config.toml", "samples.jsonl")
    for name in (*files, ".training", ".config.toml.tmp", ".environment.json.tmp", "student"):
        found.add(f"{name} to the user's", "resume", away(f"run/{name}"), ends="either")
    for name in (".step-00000006.tmp", ".latest.tmp", ".best.tmp", "step-00000006", ".step-00000006.removed"):
        target = "docs/letter.txt" if name.startswith((".latest", ".best")) else "docs"
        found.add(f"{name} to the user's", "resume", linked(f"run/checkpoints/{name}", target), ends="either")
    board = tuple(word for word in COMMANDS["resume"] if word not in ("--log-to", "none"))
    found.add("tensorboard to the user's", board, linked("run/tensorboard", "docs"), ends="either")
    found.add("wandb to the user's", "resume", linked("run/wandb", "docs"))
    found.add("wandb's latest-run to the user's", "resume", linked("run/wandb/latest-run", "docs"), ends="works")
    own = ("evaluate", "--student", "run/student", *COMMANDS["model"][3:])
    for name in ("student", "student/config.json", "student/model.safetensors"):
        found.add(f"{name} to the user's", own, away(f"run/{name}"))


def _published(found: Cases) -> None:
    """Add cases of what an export would copy from the run; nothing of the user's may come with it."""
    for name in ("chat_template.jinja", "tokenizer.json", "added_tokens.json"):
        found.add(f"tokenizer's {name} to the user's", "export", away(f"run/tokenizer/{name}"))
    found.add("tokenizer to the user's", "export", away("run/tokenizer"), ends="either")
    more = linked("run/tokenizer/hf_token", "docs/letter.txt")
    found.add("one more beside the tokenizer", "export", more, ends="works")
    found.add("teacher's chat_template.jinja to the user's", "build", away("teacher/chat_template.jinja"))
    found.add("teacher's tokenizer.json to the user's", "build", away("teacher/tokenizer.json"))


def _outputs(found: Cases) -> None:
    over = (*COMMANDS["export"], "--overwrite")
    found.add("--out to the user's folder", over, linked("new", "docs"))
    found.add("--out to an empty folder", over, linked("new", "empty"), ends="either", writes=("new", "../empty"))
    for name in ("model.safetensors", "config.json", "tokenizer.json", "kdtrain.json"):
        found.add(f"exported, {name} to the user's", over, _exported(name), ends="either")
    found.add("new.tmp to the user's", over, linked("new.tmp", "docs"), ends="either")
    found.add("new.tmp is the user's", COMMANDS["export"], lambda place: place.plant("new.tmp/a"), ends="either")
    for command in ("build", "distill"):
        found.add("--out to the user's folder", command, linked("new", "docs"))
    for command in ("build", "distill", COMMANDS["export"]):
        found.add("--out to nothing", command, linked("new", "empty/new"), ends="either", writes=("new", "../empty"))
    found.add("text to the user's", "build", linked("corpus/z.txt", "docs/letter.txt"), ends="either")
    found.add("text folder in itself", "build", linked("corpus/loop", "here/corpus"), ends="either")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        found.add(f"model's {name} to the user's", "model", away(f"model/{name}"), ends="either", resealed=False)
        found.add(f"model's {name} to itself elsewhere", "model", twin(f"model/{name}"), ends="either", same=True)


@curried
def _exported(place: Place, name: str) -> None:
    """Make an exported folder with a link and a file of the user's in it, to be overwritten."""
    place.path("model").rename(place.path("new"))
    place.link(f"new/{name}", str(place.docs / "letter.txt"))
