"""Code that would like to run: classes that configurations name, pickles, scripts beside data."""

import json
import pickle
from pathlib import Path
from typing import Any

from tests.hostile import seal
from tests.hostile.case import COMMANDS, Cases, Place, curried

_EVIL = """
import os, pathlib
for folder in (os.environ.get("HOME", "."), "."):
    pathlib.Path(folder, "pwned").write_text("code was run")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): model_type = "evil"
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
"""
_MAP = {
    "AutoConfig": "evil.Config",
    "AutoModel": "evil.Model",
    "AutoModelForCausalLM": "evil.Model",
    "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"],
}
_ABOUT = {"auto_map": _MAP}
# Folders may be named before the module; what transformers has no causal model for asks for one of auto_map.
_ELSEWHERE = {"auto_map": {name: f"evil--{value}" for name, value in _MAP.items() if isinstance(value, str)}}
_KINDS = {"llama": _ABOUT, "evil": _ABOUT, "vit": _ELSEWHERE, "clip": _ELSEWHERE, "llama with evil--": _ELSEWHERE}


class _Pickled:
    """What touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "code was run"))


def cases() -> Cases:
    """In model folders, tokenizers, checkpoints, caches, specs and data."""
    found = Cases("code")
    for name in ("model", "teacher"):
        command = {"model": "model", "teacher": "build"}[name]
        for kind in (*_KINDS, "none"):
            attack = _configured(name, kind)
            found.add(f"{name}'s config.json with auto_map, of model_type {kind}", command, attack, ends="either")
        for kind in ("Tokenizer", "AutoModelForCausalLM", "PreTrainedTokenizerFast"):
            found.add(
                f"{name}'s tokenizer of class {kind} with auto_map", command, _tokenizer(name, kind), ends="either"
            )
        for pickled in ("pytorch_model.bin", "model.pt", "training_args.bin", "tokenizer.pkl", "adapter_model.bin"):
            ends = "refused" if pickled.startswith("pytorch") else "either"
            found.add(f"{name} with {pickled}", command, _pickle(name, pickled), ends=ends)
    found.add(
        "adapter_config.json to elsewhere",
        "model",
        _json("model/adapter_config.json", {"base_model_name_or_path": "../teacher", "peft_type": "LORA"}),
        ends="either",
    )
    for kind in _KINDS:
        for command in ("export", "evaluate run", "resume") if kind != "evil" else ("inspect checkpoint", "load"):
            found.add(f"state.json with auto_map, of model_type {kind}", command, _state(kind), ends="either")
    for command in ("distill", "evaluate", "again"):
        found.add("cache's tokenizer with auto_map", command, _cache, ends="either")
    found.add("cache's tokenizer with auto_map", "finish", _unfinished, ends="either")
    found.add("spec's [config] with auto_map", "distill", _spec, ends="either")
    found.add(
        "run's student with auto_map",
        ("evaluate", "--student", "run/student", *COMMANDS["model"][3:]),
        _configured("run/student", "evil"),
    )
    for script in ("corpus.py", "dataset_infos.json", "__init__.py"):
        found.add(f"text with {script}", "build", _script(script), ends="either")
    found.add(
        "jsonl with a script",
        ("cache-teacher", "--teacher", "teacher", "--data", "rows", *COMMANDS["build"][5:]),
        _rows,
        ends="either",
    )
    for key, value in _GENERATION.items():
        found.add(
            f"generation_config's {key}", "build", _json("teacher/generation_config.json", {key: value}), ends="either"
        )
    for name in ("torch.py", "sitecustomize.py", "yaml.py"):
        found.add(f"{name} beside a spec", "distill", _beside(name), ends="works")
    return found


_GENERATION: dict[str, Any] = {
    "custom_generate": "evil",
    "watermarking_config": {"watermarking_type": "evil"},
    "cache_implementation": "os.system",
    "trust_remote_code": True,
    "_from_model_config": "evil",
}


def _evil(folder: Path) -> None:
    for name in ("evil.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(_EVIL)


def _named(config: dict[str, Any], kind: str) -> None:
    """Make a configuration one of a kind."""
    config |= _KINDS.get(kind, _ABOUT)
    config["model_type"] = kind.split()[0]
    if kind == "none":
        del config["model_type"]


@curried
def _configured(place: Place, name: str, kind: str) -> None:
    place.path("evil").mkdir()
    for folder in ("evil", name):
        _evil(place.path(folder))
    with place.json(f"{name}/config.json") as config:
        _named(config, kind)


@curried
def _tokenizer(place: Place, name: str, kind: str) -> None:
    _evil(place.path(name))
    with place.json(f"{name}/tokenizer_config.json") as config:
        config |= _ABOUT | {"tokenizer_class": kind}


@curried
def _pickle(place: Place, name: str, file: str) -> None:
    if file.startswith("pytorch"):
        place.path(f"{name}/model.safetensors").unlink()
    place.path(f"{name}/{file}").write_bytes(pickle.dumps(_Pickled(place.docs / "pwned")))


@curried
def _json(place: Place, name: str, content: Any) -> None:
    place.write(name, json.dumps(content))
    _evil(place.path(name).parent)


@curried
def _state(place: Place, kind: str) -> None:
    place.path("evil").mkdir()
    for folder in ("run/checkpoints/step-00000004", "run", "evil", "."):
        _evil(place.path(folder))
    with place.state() as state:
        state["student"]["architecture"]["_name_or_path"] = "run"
        _named(state["student"]["architecture"], kind)


def _cache(place: Place) -> None:
    _evil(place.path("cache/tokenizer"))
    with place.json("cache/tokenizer/tokenizer_config.json") as config:
        config |= _ABOUT | {"tokenizer_class": "Tokenizer"}
    seal.cache(place.path("cache"))


def _unfinished(place: Place) -> None:
    _evil(place.path("unfinished/tokenizer"))
    with place.json("unfinished/tokenizer/tokenizer_config.json") as config:
        config |= _ABOUT | {"tokenizer_class": "Tokenizer"}


def _spec(place: Place) -> None:
    _evil(place.here)
    text = place.path("student.toml").read_text()
    place.write(
        "student.toml", f"{text}\n[config.auto_map]\nAutoModelForCausalLM = 'evil.Model'\nAutoConfig = 'evil.Config'\n"
    )


@curried
def _script(place: Place, name: str) -> None:
    place.write(f"corpus/{name}", _EVIL)


def _rows(place: Place) -> None:
    place.write("rows/rows.py", _EVIL)
    place.write("rows/train.jsonl", place.path("chat.jsonl").read_text())


@curried
def _beside(place: Place, name: str) -> None:
    """Python code beside a spec that is named by its path; the command runs elsewhere."""
    place.write(f"teacher/{name}", _EVIL)
