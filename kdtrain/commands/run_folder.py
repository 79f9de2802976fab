"""The folder of a run: whose it is, whether to resume it, and what is written beside the checkpoints.

One launch at a time works in it: rank 0 holds a lock on the file `.training` there for all ranks, from before the
folder is looked at until the end. The lock ends with its process, so that what a kill leaves keeps nobody out. A rank 0
that torchrun starts anew may come before the system has released the lock of the one before it, on a node that was lost
for example, and waits for that.
"""

import dataclasses
import json
import os
import platform
import re
import sys
import typing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch

from kdtrain.cache.manifest import tokenizer_digest
from kdtrain.checkpoint.store import Store
from kdtrain.commands.build_cache import holds_tokens
from kdtrain.commands.common import digest_of
from kdtrain.config import DistillConfig, plain, sections
from kdtrain.errors import RunError, UsageError, making, writing
from kdtrain.files import (
    Lock,
    hidden_folder,
    make_folder,
    publish_text,
    read_json,
    read_text,
    read_toml,
    refuse_links,
    remove_empty,
    set_aside,
    swap_in,
    sweep,
    typed,
)
from kdtrain.models.loading import load_tokenizer
from kdtrain.models.spec import ModelSpec
from kdtrain.monitor.progress import log, warn_early
from kdtrain.ranks import on_main
from kdtrain.training.state import read_saved

FREE = {
    "run": {
        *("out", "config", "json", "steps", "epochs", "device", "micro_batch_size"),
        *("activation_checkpointing", "allow_mismatch", "dry_run", "sanity"),
    },
    "data": {"num_workers", "streaming"},
    "precision": {"compile", "compile_mode", "collect_tensors", "collect_every"},
    "guards": {"max_skips", "nan_hooks", "max_rollbacks", "divergence_factor"},
    "stopping": {
        *("early_stopping", "early_stopping_interval", "early_stopping_patience", "early_stopping_min_delta"),
        *("early_stopping_warmup", "on_plateau"),
        *("grad_spike_threshold", "grad_spike_patience"),
    },
    "checkpoint": {
        *("checkpoint_freq", "checkpoint_minutes", "keep_rolling", "keep_epochs", "keep_special", "keep_aside"),
        *("async_save", "disk_patience", "resume", "auto_resume", "overwrite"),
    },
    "monitor": {
        *("eval_freq", "eval_batches", "log_freq", "tensorboard"),
        *("histogram_freq", "sample_freq", "wandb_project", "wandb_name"),
    },
    "parallel": {"parallel", "teacher_parallel", "shard_size", "device_memory", "log_all_ranks", "rank_timeout"},
}
"""Options that may differ when a run resumes; every other one would make it another run."""

TOKENIZER = "tokenizer"
"""The folder of the tokenizer that the student is exported with."""
_SECTIONS = {"run", *(each.name for each in dataclasses.fields(DistillConfig) if dataclasses.is_dataclass(each.type))}
"""Of config.toml."""

LOCK = ".training"
"""What a launch holds while it works in the folder: see `run_lock`."""
_LEFT = re.compile(rf"{re.escape(LOCK)}|data\.left-[0-9]+|\.(config\.toml|environment\.json)\.[0-9a-f]{{12}}\.tmp")
"""What a kill leaves of an attempt that did not become a run, beside its tokens."""
_LINKS = ("checkpoints/best", "checkpoints/latest")
"""The links that a run makes itself."""

LIBRARIES = (
    "kdtrain",
    "torch",
    "transformers",
    "datasets",
    "h5py",
    "hdf5plugin",
    "numpy",
    "safetensors",
    "torchao",
)


def holds_run(config: DistillConfig) -> bool:
    """Whether there is an earlier run in `config.out`.

    Raises:
        UsageError: the folder holds something that is not a run, or a run that `--resume never` would overwrite.
    """
    out = config.out
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder")
    if not is_run(out):
        refuse_strange(out)
        return False
    if config.checkpoint.resume == "never" and not config.checkpoint.overwrite:
        raise UsageError(f"--out {out} holds a run; name another folder, or add --overwrite to move it aside")
    return True


def claim_folder(config: DistillConfig) -> bool:
    """Whether an earlier run in `config.out` is to be resumed; one that is not is moved aside.

    Raises:
        UsageError: as `holds_run`, or the user declined.
    """
    if not holds_run(config):
        return False
    if config.checkpoint.resume == "never":
        _move_aside(config.out)
        return False
    refuse_links(config.out, _LINKS)
    for path in (config.out / name for name in _LINKS):
        if path.exists() and not path.is_symlink():
            raise UsageError(f"{path} is not a link, and the run needs that name for one; move it away")
    return _agreed(config)


def restarted(config: DistillConfig) -> bool:
    """Whether torchrun has started these processes anew, to resume what they began; rank 0 decides for all."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or config.checkpoint.resume == "auto":
        return False
    try:
        begun = read_json(config.out / "environment.json", dict[str, Any]).get("launch")
    except (OSError, ValueError):
        return False
    return begun is not None and begun == launch()


def resuming(config: DistillConfig, wanted: bool) -> DistillConfig:
    """`config`, or, where it is `wanted`, one that resumes from its newest checkpoint whatever `--resume` says."""
    if not wanted:
        return config
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume="auto"))


def launch() -> str | None:
    """What tells one torchrun from another; None without one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name is None else f"{name} {os.environ.get('MASTER_ADDR')} {os.getppid()}"


class RunOptions(TypedDict):
    """Options of a run that other commands need."""

    student: str
    cache: NotRequired[str | None]


class _Run(RunOptions):
    out: str


class _Config(TypedDict):
    run: _Run


class _Libraries(TypedDict):
    kdtrain: str | None


class _Environment(TypedDict):
    """What `write_description` writes into environment.json, as far as it shows that kdtrain did."""

    python: str
    platform: str
    libraries: _Libraries


_recovered: set[Path] = set()
"""Runs whose lost options this process has logged."""


def is_run(folder: Path) -> bool:
    """Whether `folder` was written by `kdtrain distill`."""
    return options_of(folder) is not None


def options_of(folder: Path) -> RunOptions | None:
    """The options of a run; None where `folder` is not a run.

    They stand in its config.toml. Where that is lost or garbled, those in the newest valid checkpoint stand for them.
    A config.toml alone may be a file of the user's, for `--config`, and shows nothing.
    """
    options = reason = None
    try:
        options = typed(read_toml(folder / "config.toml"), _Config)["run"]
    except (OSError, ValueError) as error:
        reason = "is lost" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
    if options is not None and _is_environment(folder / "environment.json"):
        return options
    store = Store(folder / "checkpoints")
    name = store.newest_valid()[0]
    if name is None or options is not None:
        return options if name else None
    try:
        found = typed(read_saved(store.path(name))["options"].get("run"), RunOptions)
    except ValueError as error:
        raise RunError(f"{store.path(name)}/state.json is not what a run writes: options.run: {error}") from error
    if folder.resolve() not in _recovered:
        _recovered.add(folder.resolve())
        text = f"{folder / 'config.toml'} {reason}; the options of the run are those in its checkpoint {name}"
        warn_early("lost-config", text)
    return found


def refuse_strange(out: Path) -> None:
    """Refuse a folder with anything in it but what an attempt of `distill` left that did not become a run."""
    strange = sorted(path.name for path in out.iterdir() if not _LEFT.fullmatch(path.name)) if out.is_dir() else []
    if "data" in strange and holds_tokens(out / "data"):
        strange.remove("data")
    if "environment.json" in strange and _is_environment(out / "environment.json"):
        strange.remove("environment.json")
    if strange:
        raise UsageError(f"--out {out} holds something that is no run ({strange[0]}); name another folder")


def make(out: Path) -> list[Path]:
    """`make_folder`, for a folder that is written to."""
    made = make_folder(out)
    if not os.access(out, os.W_OK):
        raise RunError(f"--out {out} cannot be written: permission denied; make the folder writable")
    return made


def refuse_no_folder(out: Path) -> None:
    """Refuse what `make` cannot make, and leave nothing behind."""
    with making(out):
        there = out.exists()
    if not there:
        remove_empty(make(out))


def _agreed(config: DistillConfig) -> bool:
    """Whether to resume: asked on a terminal, yes elsewhere."""
    asked_for = config.checkpoint.auto_resume or config.checkpoint.resume != "auto"
    if asked_for or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    print(f"{config.out} holds an earlier run. Go on with it? [Y/n] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("", "y", "yes"):
        return True
    raise UsageError(f"--out {config.out} holds a run; name another folder, or use --resume never --overwrite")


def _move_aside(out: Path) -> None:
    out = out.resolve()
    aside = set_aside(out.parent, out.name, "old")
    log.info("the earlier run was moved to %s", aside)


def deciding(config: DistillConfig) -> dict[str, dict[str, Any]]:
    """The options that decide the result of a run, by section."""
    return {
        section: {name: value for name, value in table.items() if name not in FREE.get(section, set())}
        for section, table in sections(config).items()
    }


def changes(saved: dict[str, Any], config: DistillConfig, only: str | None = None) -> list[str]:
    """The deciding options that differ from `saved`, in words; an option that did not exist yet had its default.

    only: the one section that is looked at.
    """
    return [
        f"--{name.replace('_', '-')} (was {before}, now {value})"
        for section, table in deciding(config).items()
        if only in (None, section)
        for name, value in table.items()
        if (before := saved.get(section, {}).get(name, _default(section, name))) != value
    ]


def _default(section: str, name: str) -> Any:
    kind = DistillConfig if section == "run" else typing.get_type_hints(DistillConfig)[section]
    default = next(each.default for each in dataclasses.fields(kind) if each.name == name)
    return None if default is dataclasses.MISSING else plain(default)


def refuse_changes(saved: dict[str, Any], config: DistillConfig, checkpoint: str) -> None:
    """Refuse to resume a run whose deciding options were others in a checkpoint, by name."""
    if changed := changes(saved, config):
        raise UsageError(
            f"{config.out} holds a run with other options: {', '.join(changed)} (in {checkpoint}); "
            "give the same ones, name another --out, or use --resume never --overwrite"
        )


def used(config: DistillConfig) -> dict[str, dict[str, Any]]:
    """The options by section, without those of text where the run reads a cache, which has its own."""
    return {section: table for section, table in sections(config).items() if section != "data" or config.cache is None}


def write_description(config: DistillConfig, facts: dict[str, Any]) -> None:
    """Write `environment.json` and `config.toml` (as `--config` reads it) into the run.

    What stands there and is not as kdtrain writes it is the user's, and is moved aside.
    """
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        **facts,
    }
    # The environment comes first: it shows that kdtrain wrote the folder, and a configuration alone shows nothing.
    for name, is_own, text in (
        ("environment.json", _is_environment, json.dumps(environment, indent=1) + "\n"),
        ("config.toml", _is_written, to_toml(used(config))),
    ):
        if (config.out / name).exists() and not is_own(config.out / name):
            aside = set_aside(config.out, name, "old")
            log.info("%s was not as kdtrain writes it, and was moved to %s", config.out / name, aside)
        publish_text(config.out / name, text, f"run.{name.partition('.')[0]}")


def _is_environment(path: Path) -> bool:
    """Whether a file is what `write_description` writes into environment.json."""
    try:
        return bool(read_json(path, _Environment))
    except (OSError, ValueError):
        return False


def _is_written(path: Path) -> bool:
    """Whether a file is what `write_description` writes into config.toml: every section, and no comments."""
    try:
        tables = typed(read_toml(path), dict[str, dict[str, Any]])
        return tables.keys() in (_SECTIONS, _SECTIONS - {"data"}) and to_toml(tables) == read_text(path)
    except (OSError, ValueError, TypeError):  # a date, which JSON does not have
        return False


def write_tokenizer(out: Path, student: ModelSpec, cached: Path) -> None:
    """Keep in the run what the student is exported with, unless it is there: the cache may be gone by then.

    The student's own tokenizer, with the chat template of the one in the folder `cached` where it has none; and that
    one where the student comes without a tokenizer, or with another than its tokens were made with.
    """
    target = out / TOKENIZER
    if target.is_dir():
        return
    tokenizer = load_tokenizer(cached)
    named = student if student.tokenizer or student.init == "pretrained" else None
    if digest_of(named) == tokenizer_digest(tokenizer):
        own = load_tokenizer(student)
        own.chat_template = own.chat_template or tokenizer.chat_template
        tokenizer = own
    with writing(target), hidden_folder(target) as hidden:
        tokenizer.save_pretrained(hidden)
        swap_in(hidden, target, "run.tokenizer")


def to_toml(tables: dict[str, dict[str, Any]]) -> str:
    """`tables` as TOML; an option that is None is left out, since TOML has no word for it."""
    lines = []
    for section, table in tables.items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml(value)}" for name, value in table.items() if value is not None and name != "config"]
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    """`value` as TOML: JSON, but for surrogate pairs, which TOML does not know, and DEL, which it escapes."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


HANDOVER = 120.0
"""Seconds that a launch waits for an earlier attempt of its own: a file server gives up a lost node after 90 or so."""


@contextmanager
def run_lock(config: DistillConfig) -> Iterator[bool]:
    """Keep other launches out of `config.out` for as long as the block runs; whether an earlier run is resumed.

    Every rank must enter it; the folder is claimed on rank 0. One that is made for it and stays empty is removed.

    Raises:
        UsageError: another process is training there, no folder can be there, or `claim_folder` refuses it.
        RunError: it cannot be written.
    """
    with ExitStack() as held:
        yield on_main(lambda: _enter(config, held))


def _enter(config: DistillConfig, held: ExitStack) -> bool:
    with making(config.out):
        holds_run(config)  # what is refused stays as it was
        _lock(config.out, held)
        if resumes := claim_folder(config):
            sweep(config.out)
        if not config.out.exists():  # an earlier run was moved aside, and the file that is locked went with it
            _lock(config.out, held)
        return resumes


def _lock(out: Path, held: ExitStack) -> None:
    """Hold a folder, which is made where it was not there, until `held` ends."""
    held.callback(remove_empty, make(out))
    message = f"another process is training in {out}; wait for it, or name another --out"
    # what the attempts of one launch have in common; empty without torchrun
    identity = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    name = (launch() or "") if identity == "none" else identity
    held.callback(Lock(out / LOCK, message, name, HANDOVER).release)
