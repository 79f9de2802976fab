"""The folder of a run: whether it holds a run, whether to resume it, its lock, and the files beside the checkpoints.

One launch at a time uses the folder: rank 0 holds a lock on the file `.training` for all ranks, from before it reads
the folder until the end. The lock ends with its process, so that a killed run does not block the next one. When
torchrun restarts rank 0, the system may not have released the lock of the previous attempt yet, for example after a
node is lost; the new attempt waits for it.
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch

from kdtrain.config.choices import registered
from kdtrain.config.commands import DistillConfig
from kdtrain.config.kinds import choices, metavar
from kdtrain.config.removed import renewed
from kdtrain.config.sections import FIXED_ALPHA, DataConfig, LoraConfig
from kdtrain.config.values import fields_of, flag, options_of, sections, shareable, written
from kdtrain.errors import RunError, UsageError, log, making, writing
from kdtrain.files import (
    Lock,
    hidden_folder,
    make_writable,
    publish_text,
    read_json,
    read_text,
    read_toml,
    refuse_displacing,
    refuse_links,
    remove_empty,
    set_aside,
    swap_in,
    sweep,
    temporary_of,
    typed,
)
from kdtrain.models.spec import ATTENTIONS, SELF, ModelSpec
from kdtrain.models.tokenizer import ChatTokenizer, digest_of, generation_of, load_tokenizer, tokenizer_digest
from kdtrain.monitor.facts import LOCK, is_environment, is_run
from kdtrain.ranks import all_gather_object, on_main
from kdtrain.registry import first_line
from kdtrain.training.state import read_saved

TOKENIZER = "tokenizer"
"""The folder of the tokenizer for the exported student."""
_SECTIONS = {"run", *(each.name for each in dataclasses.fields(DistillConfig) if dataclasses.is_dataclass(each.type))}
"""The tables of config.toml."""
_MAY_LACK = {"data"}
"""Those that it may not have: a run from a cache has no text."""
_TRIES = {"config", "dry_run", "write_config", "sanity"}
"""What a file to copy does not have."""

_LEFT = re.compile(rf"{re.escape(LOCK)}|(data|view|prompts)\.left-[0-9]+")
"""Files, besides tokens and temporary ones, that an attempt leaves when it dies before it becomes a run."""
_LINKS = ("checkpoints/best", "checkpoints/latest")
"""The links that a run makes."""
_WANDB = "wandb/"
"""The folder in which the package wandb keeps its runs, its logs and links to them; kdtrain writes nothing there."""

_LIBRARIES = ["kdtrain", "torch", "transformers", "datasets", "h5py", "hdf5plugin", "numpy", "safetensors", "torchao"]


def holds_run(config: DistillConfig) -> bool:
    """Return whether `config.out` holds an earlier run.

    UsageError: it holds something else, a run that `--resume never` would overwrite, or one that cannot be moved aside,
    because the command needs what is in it.
    """
    out = config.out
    anew = config.checkpoint.resume == "never"
    if not check_out(out):
        return False
    if anew and not config.checkpoint.overwrite:
        raise UsageError(f"--out {out} holds a run; name another folder, or add --overwrite to move it aside")
    if anew:
        needed: dict[str, Path | str | None] = {"--load": config.checkpoint.load, "--data": config.data.data}
        needed |= {f"--cache {number}".removesuffix(" 1"): each for number, each in enumerate(config.cache, 1)}
        if config.teacher not in (None, SELF):
            needed |= ModelSpec.paths_of(config.teacher, "--teacher", "teachers")
        needed |= ModelSpec.paths_of(config.student, "--student")
        refuse_displacing(out, needed)
    else:
        refuse_displacing(out / "student", {})  # which the export replaces, perhaps after days
    return True


def claim_folder(config: DistillConfig) -> bool:
    """Return whether to resume an earlier run in `config.out`; with `--resume never` move it aside.

    UsageError: as `holds_run`.
    """
    if not holds_run(config):
        return False
    out = config.out
    if config.checkpoint.resume == "never":
        real = out.resolve()
        log.info("the earlier run was moved to %s", set_aside(real.parent, real.name, "old"))
        return False
    refuse_links(out, (*_LINKS, _WANDB))
    for path in (out / name for name in _LINKS):
        if path.exists() and not path.is_symlink():
            raise UsageError(f"{path} is not a link, and the run needs that name for one; move it away")
    return True


def restarted(config: DistillConfig) -> bool:
    """Return whether torchrun has restarted this launch, which then resumes its own run; rank 0 decides for all."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or config.checkpoint.resume == "auto":
        return False
    try:
        launched_by = read_json(config.out / "environment.json", dict[str, Any]).get("launch")
    except (OSError, ValueError):
        return False
    return launched_by is not None and launched_by == launch()


def saved_choices(config: DistillConfig, out: Path) -> tuple[str | None, float | None, float | None]:
    """Return the attention, the peak rate and the earlier default of alpha that a run keeps which `--resume` finds.

    The rate is else the rate of the run whose schedule `--load` continues. None: there is none, or it cannot be read.
    """
    start = config.checkpoint
    loaded = _saved(start.load, str(start.load)) if start.load and not start.override_opt_param_scheduler else ()
    own = next(_saved(out, start.resume), {})
    attention = str(own["student"]["attention"]) if own else ""
    alpha = own.get("options", {}).get("objective", {}).get("alpha")
    rate = (own or next(iter(loaded), {})).get("options", {}).get("optimizer", {}).get("lr")
    return (
        attention if attention in ATTENTIONS else None,
        float(rate) if type(rate) in (int, float) and 0 < rate < math.inf else None,
        alpha if alpha == FIXED_ALPHA else None,
    )


def _saved(out: Path, resume: str) -> Iterator[dict[str, Any]]:
    """Yield the states of the checkpoint that `--resume` would take for `out`, and of others of its run, where read."""
    folder = out / "checkpoints"
    with suppress(OSError):  # `holds_run` names what is wrong with the folder
        named = [] if resume in ("auto", "never") else [folder / resume, Path(resume)]
        own = [] if resume == "never" else sorted(folder.glob("*-*"), reverse=True)
        for path in (*named, *own):
            with suppress(RunError, OSError):
                yield read_saved(path)


def launch() -> str | None:
    """Identify this launch of torchrun; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name is None else f"{name} {os.environ.get('MASTER_ADDR')} {os.getppid()}"


def check_out(out: Path) -> bool:
    """Return whether `out` holds a run; refuse all but what an attempt without a run has left."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder")
    if is_run(out):
        return True
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    foreign = [name for name in names if not _LEFT.fullmatch(name) and not temporary_of(name)]
    if foreign:
        from kdtrain.tokenizers.view_format import OWN, own_data

        foreign = [name for name in foreign if name not in OWN or not own_data(out / name)]
    if "environment.json" in foreign and is_environment(out / "environment.json"):
        foreign.remove("environment.json")
    if foreign:
        raise UsageError(f"--out {out} holds something that is not a run ({foreign[0]}); name another folder")
    return False


def existing_parent(path: Path) -> Path:
    """Return `path` or its nearest existing parent, which is on the disk where `path` will be."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


@contextmanager
def trial_folder(out: Path, check: Callable[[Path], object] = check_out) -> Iterator[Path]:
    """Make a hidden folder beside `out`, which `check` may refuse, the same for all ranks, and remove it at the end."""
    with ExitStack() as stack:

        def make() -> str:
            with making(out):
                check(out)
                parent = existing_parent(out.resolve().parent)
                return str(stack.enter_context(hidden_folder(parent / f"{out.name}.trial")))

        yield Path(on_main(make))
        all_gather_object(None)  # a barrier: every rank has finished reading


def changes(
    saved: dict[str, Any], config: DistillConfig, only: str | None = None, but: Collection[str] = ()
) -> list[str]:
    """Describe the deciding options that differ from `saved`; an option that is missing there had its default.

    only: the one section to compare. but: options to leave out.
    """
    found = []
    later = config.later()
    for section, table in config.deciding().items():
        before = {each.name: written(each, each.default) for home, each in fields_of(DistillConfig) if home == section}
        table = {name: before[name] for name in later.keys() & before.keys()} | table
        earlier = renewed("distill", saved.get(section, {}))
        before |= earlier.table
        gone = saved.get(section, {}).keys() - earlier.table.keys()
        if only in (None, section):
            found += earlier.refused
            found += [
                f"{flag(name)} (was {before[name]}, now {value})"
                for name, value in table.items()
                if name not in but and name not in gone and before[name] != value
            ]
    return found


def refuse_changes(
    saved: dict[str, Any], config: DistillConfig, out: Path, checkpoint: str, but: Collection[str] = ()
) -> None:
    """Refuse to resume the run in `out` from a checkpoint with other deciding options, and name them."""
    if changed := changes(saved, config, but=but):
        load = f" (with --load {out} --override-opt-param-scheduler to start from its weights)"
        raise UsageError(
            f"{out} holds a run with other options: {', '.join(changed)} (in {checkpoint}); "
            f"give the same ones, name another --out{load if changes(saved, config, only='optimizer') else ''}, "
            "or use --resume never --overwrite"
        )


def refuse_other_training(saved: dict[str, Any], own: dict[str, Any], path: Path) -> None:
    """Name what differs where a run trains another part of the same student, or beside other weights."""
    if saved.get("lora") != own.get("lora") or saved.get("freeze_head") != own.get("freeze_head"):
        before, now = map(_trained, (saved, own))
        raise UsageError(f"{path} trained {before}, and this run trains {now}; give the same, or name another --out")
    if saved.get("weights") != own.get("weights"):
        before, now = (each.get("weights") or "full" for each in (saved, own))
        raise UsageError(
            f"{path} was trained beside {before} frozen weights, and this run has {now} ones; give the same "
            "--base-weights, or name another --out"
        )
    if saved.get("base") != own.get("base"):
        raise UsageError(
            f"{path} holds only what was trained, beside other weights than those of this student (their digests "
            "differ); give the student that it began with, or name another --out"
        )


def _trained(student: dict[str, Any]) -> str:
    if "lora" not in student:
        return "all but the output head" if student.get("freeze_head") else "all weights"
    try:
        return str(LoraConfig(**student["lora"]))
    except (TypeError, UsageError):  # of a later version
        return "adapters of another kind"


def used(config: DistillConfig) -> dict[str, dict[str, Any]]:
    """Return the options to record.

    Options of text are left out if the run reads a cache, which has its own, and a plugin's if all have their defaults.
    """
    idle = {name for name, each in config.plugins.items() if each == type(each)()}
    idle |= _MAY_LACK if config.cache and config.data.data is None else set()
    return {section: table for section, table in shareable(config).items() if section not in idle}


def write_description(config: DistillConfig, metadata: dict[str, Any]) -> None:
    """Write `environment.json` and `config.toml` (as `--config` reads it) into the run.

    A file of that name that kdtrain did not write is the user's, and is moved aside.
    """
    versions: dict[str, str | None] = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "libraries": versions,
        **metadata,
    }
    # The environment comes first: it marks the folder as kdtrain's, which a configuration alone does not.
    for name, is_own, text in (
        ("environment.json", is_environment, json.dumps(environment, indent=1) + "\n"),
        ("config.toml", _is_written, to_toml(used(config))),
    ):
        if (config.out / name).exists() and not is_own(config.out / name):
            aside = set_aside(config.out, name, "old")
            log.info("%s was not written by kdtrain, and was moved to %s", config.out / name, aside)
        publish_text(config.out / name, text, f"run.{name.partition('.')[0]}")


def _is_written(path: Path) -> bool:
    """Return whether `write_description` wrote this config.toml: it has all sections but plugins', and no comments."""
    try:
        tables = typed(read_toml(path), dict[str, dict[str, Any]])
        needed = _SECTIONS - _MAY_LACK - {"lora"}  # earlier versions had no [lora]
        return needed <= tables.keys() and to_toml(tables) == read_text(path)
    except (OSError, ValueError, TypeError):  # TypeError: a date, which JSON does not have
        return False


class _Length(TypedDict):
    steps: NotRequired[int]
    epochs: NotRequired[float]


def planned_before(config: DistillConfig, sequences: int) -> int | None:
    """Return the steps that the run in `config.out` had at its last start, over `sequences`; None if unknown."""
    with suppress(OSError, ValueError):
        return typed(read_json(config.out / "environment.json", dict[str, Any]).get("steps"), int)
    with suppress(OSError, ValueError):  # of a version that did not write it
        return config.total_steps(sequences, typed(read_toml(config.out / "config.toml").get("run"), _Length))
    return None


def write_tokenizer(out: Path, student: ModelSpec, cached: Path | None, teacher: ModelSpec | None) -> None:
    """Copy the tokenizer for the export into the run, unless it is there: the cache may be gone by then.

    Without `cached` there is none. It is the student's own, with the chat template of the one in the folder `cached` if
    it has none; or the one in `cached` if the student has no tokenizer, or another one than its training tokens. The
    generation settings of a chat model are copied with it: the student's, the online `teacher`'s, or those in `cached`.
    """
    target = out / TOKENIZER
    if target.is_dir() or cached is None:
        return
    tokenizer = load_tokenizer(cached)
    named = student if student.tokenizer or student.init == "pretrained" else None
    sources: list[ModelSpec | Path] = [] if teacher is None else [teacher]
    if digest_of(named) == tokenizer_digest(tokenizer):
        own = load_tokenizer(student)
        own.chat_template = own.chat_template or tokenizer.chat_template
        tokenizer = own
        sources.insert(0, student)
    elif student.teacher is not None:
        sources.insert(0, student)
    generation = next((found for each in (*sources, cached) if (found := generation_of(each)) is not None), None)
    with writing(target), hidden_folder(target) as hidden:
        ChatTokenizer(tokenizer, generation).save_pretrained(hidden)
        swap_in(hidden, target, "run.tokenizer")


def to_toml(tables: dict[str, dict[str, Any]], notes: Mapping[str, Iterable[str]] | None = None) -> str:
    """Return `tables` as TOML, without options that are None, which TOML does not have.

    notes: lines of comment above an option, or above a section by its name in brackets. An option that is None and has
        notes is commented out, as the last of them.
    """
    lines = []
    notes = notes or {}
    for section, table in tables.items():
        lines += [*(f"# {each}" for each in notes.get(f"[{section}]", ())), f"[{section}]"]
        for name, value in table.items():
            lines += [f"# {each}" for each in notes.get(name, ())]
            if value is not None and name != "config":
                # JSON is TOML, except for surrogate pairs, which TOML does not have, and DEL, which it escapes
                text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
                lines.append(f"{name} = {text}")
        lines.append("")
    return "\n".join(lines)


def write_config_to_copy(config: DistillConfig) -> None:
    """Write every option of `config` into its file for `--config`, each below its line of help.

    It has no dry run, no [data] where a run from a cache gives none, and no plugin that has its defaults.

    UsageError: the file is there already. RunError: it cannot be written.
    """
    assert config.write_config is not None
    left_out = {name for name, each in config.plugins.items() if each == type(each)()}
    left_out |= _MAY_LACK if config.cache and config.data == DataConfig() else set()
    tables = {section: table for section, table in sections(config).items() if section not in left_out}
    tables["run"] = {name: tables["run"][name] for name in tables["run"] if name not in _TRIES}
    notes = dict[str, list[str]]()
    for each in options_of(DistillConfig).values():
        known = ", ".join(choices(each.kind) or registered(each.flag))
        listed = f" Known: {known}" if known else ""
        text = f"{each.text}{listed}{each.default_text}"
        unset = [f"{each.name} = {each.field.metadata.get('shown') or metavar(each.kind)}"]
        has_value = tables.get(each.section, {}).get(each.name) is not None
        notes[each.name] = [*textwrap.wrap(text, 110), *([] if has_value else unset)]
        notes.setdefault(f"[{each.section}]", textwrap.wrap(first_line(each.owner), 110))
    with writing(config.write_config):
        try:
            with open(config.write_config, "x", encoding="utf-8") as file:
                file.write(to_toml(tables, notes))
        except FileExistsError:
            raise UsageError(f"--write-config {config.write_config}: it is there already; name another file") from None


HANDOVER = 120.0
"""Seconds that a launch waits for its own earlier attempt: a file server gives up a lost node after about 90."""


@contextmanager
def run_lock(config: DistillConfig) -> Iterator[bool]:
    """Keep other launches out of `config.out` during the block; yield whether an earlier run is resumed.

    Every rank must enter it; rank 0 claims the folder. A folder that it makes and that stays empty is removed.

    UsageError: another process trains there, the folder cannot be made, or `claim_folder` refuses it. RunError: the
    folder is not writable.
    """

    def enter() -> bool:
        with making(config.out):
            holds_run(config)  # a refusal changes nothing
            _lock(config.out, held)
            if resumes := claim_folder(config):
                sweep(config.out)
            if not config.out.exists():  # an earlier run was moved aside together with the lock file
                _lock(config.out, held)
            return resumes

    with ExitStack() as held:
        yield on_main(enter)


def _lock(out: Path, held: ExitStack) -> None:
    """Make the folder if necessary, and lock it until `held` ends."""
    held.callback(remove_empty, make_writable(out))
    message = f"another process is training in {out}; wait for it, or name another --out"
    # the same for all attempts of one launch; empty without torchrun
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    name = (launch() or "") if run_id == "none" else run_id
    held.callback(Lock(out / LOCK, message, name, HANDOVER).release)
