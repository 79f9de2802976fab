"""`kdtrain export`: a trained student as a folder that `transformers.AutoModelForCausalLM` loads."""

import json
import tomllib
from pathlib import Path
from typing import Any

import torch

from kdtrain.checkpoint.store import MANIFEST, Store, load, problem
from kdtrain.config import ExportConfig
from kdtrain.errors import RunError, UsageError
from kdtrain.models.head import SplitModel, split
from kdtrain.models.loading import export_model, load_student
from kdtrain.models.spec import read_spec
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.stages.common import show
from kdtrain.stages.run_folder import write_origin


def main(config: ExportConfig) -> int:
    """Write the student of a run's checkpoint into `config.out`.

    Raises:
        UsageError: there is no such run or checkpoint, or `config.out` holds something.
        RunError: the checkpoint is damaged.
    """
    setup_logging()
    out = config.out
    if out.exists() and not (out.is_dir() and (config.overwrite or not any(out.iterdir()))):
        raise UsageError(f"--out {out} is not empty; name another folder, or add --overwrite")
    path = _checkpoint(config.run, config.checkpoint)
    student = student_at(path, torch.device("cpu"))
    tokenizer = tokenizer_of_run(_run_of(path))
    export_model(student, tokenizer, out, dtype=config.dtype)
    step = int(path.name.removeprefix("step-"))
    write_origin(out, json.loads((path / "state.json").read_text())["cache"], step)
    parameters = sum(each.numel() for each in student.parameters())
    show(
        f"export {out}",
        {"student": str(out), "checkpoint": path.name, "step": step, "parameters": parameters},
        config.json,
    )
    return 0


def open_student(name: str, device: torch.device) -> tuple[SplitModel, Path | str | None]:
    """The student that `name` means, and where its tokenizer is, if anywhere.

    Args:
        name: a run (its best checkpoint, or the newest where none is best), a checkpoint, or a model spec.
        device: where it is put.
    """
    path = Path(name)
    if (path / MANIFEST).exists() and path.resolve().name.startswith("step-"):
        if (wrong := problem(path)) is not None:
            raise RunError(f"checkpoint {path} is damaged: {wrong}")
        return student_at(path.resolve(), device), tokenizer_of_run(_run_of(path.resolve()))
    if (path / "config.toml").exists():
        return student_at(_checkpoint(path, "best"), device), tokenizer_of_run(path)
    spec = read_spec(name)
    return split(load_student(spec, vocab_size=None, seed=0, device=str(device))), spec.tokenizer or spec.source


def student_at(path: Path, device: torch.device) -> SplitModel:
    """The student of a checkpoint folder, built from the run's own specification."""
    run = _run_of(path)
    options = _toml(run / "config.toml")
    facts = json.loads((run / "environment.json").read_text())
    spec = read_spec(options["run"]["student"])
    student = split(load_student(spec, vocab_size=facts["student"]["vocab_size"], seed=0, device="cpu"))
    checkpoint = load(path)
    own = student.state_dict()
    weights = {
        name.removeprefix("student."): value
        for name, value in checkpoint.tensors.items()
        if name.startswith("student.")
    }
    unknown = weights.keys() - own.keys()
    if unknown:
        raise RunError(f"checkpoint {path} does not fit student {spec.name}: {sorted(unknown)[0]} is unknown")
    with torch.no_grad():
        for entry, value in weights.items():
            own[entry].copy_(value)
    return student.to(device)


def tokenizer_of_run(run: Path) -> Path | None:
    """The tokenizer folder that a run's tokens were made with: its cache's, or its own."""
    options = _toml(run / "config.toml")
    cache = options["run"].get("cache")
    folder = (Path(cache) if cache else run / "data") / "tokenizer"
    if folder.is_dir():
        return folder
    exported = run / "student"
    return exported if (exported / "tokenizer.json").exists() else None


def _checkpoint(run: Path, wanted: str) -> Path:
    """The folder of a run's checkpoint; `best` falls back to the newest where validation never marked one."""
    if not (run / "config.toml").exists():
        raise UsageError(f"{run} is no run; give a folder that kdtrain distill wrote")
    store = Store(run / "checkpoints")
    if wanted == "best" and not (store.folder / "best").exists():
        wanted = "latest"
        log.info("%s has no best checkpoint yet; taking the newest", run)
    return store.choose(wanted)


def _run_of(checkpoint: Path) -> Path:
    return checkpoint.resolve().parent.parent


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
