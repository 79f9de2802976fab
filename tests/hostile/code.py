"""Code that would like to run: classes that configurations name, pickles, scripts beside data."""

import json
import pickle
from pathlib import Path
from typing import Any

from tests.hostile import seal
from tests.hostile.case import COMMANDS, Cases, Place, curried, wrote

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
    """An object that touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "code was run"))


_GENERATION: dict[str, Any] = {
    "custom_generate": "evil",
    "watermarking_config": {"watermarking_type": "evil"},
    "cache_implementation": "os.system",
    "trust_remote_code": True,
    "_from_model_config": "evil",
}


def cases() -> Cases:
    """List cases of foreign code in model folders, tokenizers, checkpoints, caches, specs and data."""
    found = Cases("code", ends="either")
    for name, command in (("model", "model"), ("teacher", "build")):
        for kind in (*_KINDS, "none"):
            found.add(f"{name}'s config.json with auto_map, of model_type {kind}", command, _configured(name, kind))
        for kind in ("Tokenizer", "AutoModelForCausalLM", "PreTrainedTokenizerFast"):
            found.add(f"{name}'s tokenizer of class {kind} with auto_map", command, _tokenizer(name, kind))
        for pickled in ("pytorch_model.bin", "model.pt", "training_args.bin", "tokenizer.pkl", "adapter_model.bin"):
            ends = "refused" if pickled.startswith("pytorch") else "either"
            found.add(f"{name} with {pickled}", command, _pickle(name, pickled), ends=ends)
    adapter = {"base_model_name_or_path": "../teacher", "peft_type": "LORA"}
    found.add("adapter_config.json to elsewhere", "model", _json("model/adapter_config.json", adapter))
    for kind in _KINDS:
        for command in ("export", "evaluate run", "resume") if kind != "evil" else ("inspect checkpoint", "load"):
            found.add(f"state.json with auto_map, of model_type {kind}", command, _state(kind))
    for command in ("distill", "evaluate", "again", "finish"):
        folder = "unfinished" if command == "finish" else "cache"
        found.add("cache's tokenizer with auto_map", command, _tokenizer(f"{folder}/tokenizer", "Tokenizer"))
    found.add("spec's [config] with auto_map", "distill", _spec)
    own = ("evaluate", "--student", "run/student", *COMMANDS["model"][3:])
    found.add("run's student with auto_map", own, _configured("run/student", "evil"), ends="refused")
    for script in ("corpus.py", "dataset_infos.json", "__init__.py"):
        found.add(f"text with {script}", "build", wrote(f"corpus/{script}", _EVIL))
    rows = ("cache-teacher", "--teacher", "teacher", "--data", "rows", *COMMANDS["build"][5:])
    found.add("jsonl with a script", rows, _rows)
    for key, value in _GENERATION.items():
        found.add(f"generation_config's {key}", "build", _json("teacher/generation_config.json", {key: value}))
    for name in (
        "torch.py",
        "sitecustomize.py",
        "yaml.py",
    ):  # the spec is named by its path; the command runs elsewhere
        found.add(f"{name} beside a spec", "distill", wrote(f"teacher/{name}", _EVIL), ends="works")
    return found


def _evil(place: Place, *folders: str) -> None:
    for folder in folders:
        for name in ("evil.py", "custom_generate/generate.py"):
            place.write(f"{folder}/{name}", _EVIL)


def _named(config: dict[str, Any], kind: str) -> None:
    """Make a configuration one of a kind."""
    config |= _KINDS.get(kind, _ABOUT)
    config["model_type"] = kind.split()[0]
    if kind == "none":
        del config["model_type"]


@curried
def _configured(place: Place, name: str, kind: str) -> None:
    _evil(place, "evil", name)
    with place.json(f"{name}/config.json") as config:
        _named(config, kind)


@curried
def _tokenizer(place: Place, name: str, kind: str) -> None:
    _evil(place, name)
    with place.json(f"{name}/tokenizer_config.json") as config:
        config |= _ABOUT | {"tokenizer_class": kind}
    if name.startswith("cache"):
        seal.cache(place.path("cache"))


@curried
def _pickle(place: Place, name: str, file: str) -> None:
    if file.startswith("pytorch"):
        place.path(f"{name}/model.safetensors").unlink()
    place.path(f"{name}/{file}").write_bytes(pickle.dumps(_Pickled(place.docs / "pwned")))


@curried
def _json(place: Place, name: str, content: Any) -> None:
    place.write(name, json.dumps(content))
    _evil(place, name.partition("/")[0])


@curried
def _state(place: Place, kind: str) -> None:
    _evil(place, "run/checkpoints/step-00000004", "run", "evil", ".")
    with place.state() as state:
        state["student"]["architecture"]["_name_or_path"] = "run"
        _named(state["student"]["architecture"], kind)


def _spec(place: Place) -> None:
    _evil(place, ".")
    lines = place.path("student.toml").read_text()
    more = "[config.auto_map]\nAutoModelForCausalLM = 'evil.Model'\nAutoConfig = 'evil.Config'\n"
    place.write("student.toml", f"{lines}\n{more}")


def _rows(place: Place) -> None:
    place.write("rows/rows.py", _EVIL)
    place.write("rows/train.jsonl", place.path("chat.jsonl").read_text())
