"""`kdtrain export`: writes a trained student as a folder that `transformers.AutoModelForCausalLM` loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kdtrain.checkpoint.sealed import checkpoint_at, is_checkpoint, problem, read_checkpoint
from kdtrain.checkpoint.store import Store
from kdtrain.commands.model_card import card_files
from kdtrain.commands.result import read_result
from kdtrain.commands.run_folder import TOKENIZER, is_run, refuse_no_folder
from kdtrain.config import ExportConfig
from kdtrain.errors import RunError, UsageError
from kdtrain.files import refuse_displacing, refuse_leading_out
from kdtrain.models.head import SplitModel, split
from kdtrain.models.int8 import refuse_without_torchao
from kdtrain.models.loading import (
    export_lock,
    export_model,
    load_student,
    model_of,
    refuse_foreign,
    tokenizer_files,
)
from kdtrain.models.publish import publish
from kdtrain.models.spec import read_spec, shipped
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.monitor.tables import show
from kdtrain.ranks import is_main, on_main, process_group
from kdtrain.training.state import load_saved, read_saved

_PATIENCE = 600.0
"""Seconds that the other processes wait for a sign of rank 0."""


def main(config: ExportConfig) -> int:
    """Write the student of a run's checkpoint into `config.out`; of several processes rank 0 does, the others wait.

    Raises:
        UsageError: there is no such run or checkpoint, `config.out` is not empty, or another process exports there.
        RunError: the checkpoint is damaged.
    """
    setup_logging(quiet=not is_main())
    with process_group(torch.device("cpu"), _PATIENCE):
        result = on_main(lambda: _export(config))
    show(f"export {result['student']}", result, config.json)
    return 0


def _export(config: ExportConfig) -> dict[str, Any]:
    """Export under the lock of the folder, and return what is shown."""
    refuse_no_folder(config.out)
    if config.quantize is not None:
        refuse_without_torchao()
    with export_lock(config.out):
        result = _write(config)
        if config.push is not None:
            repository = config.push.removeprefix("hf:")
            message = f"Step {result['step']:,} of {config.run.name}, by kdtrain"
            log.info("publishing %s on the hub as %s", result["student"], repository)
            result["url"] = publish(Path(result["student"]), repository, private=config.private, message=message)
        return result


def _write(config: ExportConfig) -> dict[str, Any]:
    out = config.out
    refuse_foreign(out)
    refuse_displacing(out, {"the run": config.run})
    if out.exists() and any(out.iterdir()) and not config.overwrite:
        raise UsageError(f"--out {out} holds an exported model; name another folder, or add --overwrite")
    path, student, state = read_checkpoint(
        lambda: checkpoint_of(config.run, config.checkpoint),
        lambda path: (path, student_at(path, torch.device("cpu")), read_saved(path)),
    )
    run = _run_of(path)
    folder = tokenizer_of_run(run)
    if folder is None:
        text = "exported without a tokenizer: %s holds none; copy that of its student or teacher into %s"
        log.warning(text, run, out)
    tokenizer = None if folder is None else tokenizer_files(folder)
    step = state["progress"]["step"]
    result = read_result(run)
    if result is not None and result["error"] is not None:
        log.warning("%s ended with an error (%s): this is its student of step %d", run, result["stop_reason"], step)
    parameters = sum(each.numel() for each in student.parameters())
    weights = config.torch_dtype if config.quantize is None else f"int8, the rest {config.torch_dtype}"
    aside = export_model(
        student,
        tokenizer,
        out,
        dtype=config.torch_dtype,
        origin=origin_of(state, step),
        shard_gb=config.shard_size,
        int8=config.quantize is not None,
        beside=card_files(out, run, state, parameters=parameters, weights=weights, license=config.license),
    )
    out = out if out.exists() else out.resolve()  # missing/../x
    if aside:
        log.warning("%s held more than an export, and is now %s", out, aside)
    return {"student": str(out), "checkpoint": path.name, "step": step, "parameters": parameters}


def origin_of(identity: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Where the student of `step` of a run comes from, for the exported folder: of a mixture each cache."""
    return {"cache": identity["cache"], "step": step} | {k: identity[k] for k in ("caches",) if k in identity}


def open_student(name: str, device: torch.device) -> tuple[SplitModel, Path | str | None]:
    """Load a student, and return it with the place of its tokenizer, or None.

    Args:
        name: a run (its best checkpoint, or the newest where none is best), a checkpoint, or a model spec. A bare name
            that ships is the student that ships, as in `read_spec`; `./NAME` is a folder.
        device: the student's device.
    """
    path, ships = Path(name), name in shipped("students")
    if not ships and is_checkpoint(path.resolve()):

        def read(found: Path) -> SplitModel:
            if (damage := problem(found)) is not None:
                raise RunError(f"checkpoint {path} is damaged: {damage}")
            return student_at(found, device)

        return read_checkpoint(lambda: checkpoint_at(path), read), tokenizer_of_run(_run_of(path.resolve()))
    if not ships and is_run(path):
        student = read_checkpoint(lambda: checkpoint_of(path, "best"), lambda found: student_at(found, device))
        return student, tokenizer_of_run(path)
    spec = read_spec(name)
    return split(load_student(spec, vocab_size=None, seed=0, device=str(device))), spec.tokenizer or spec.source


def student_at(path: Path, device: torch.device) -> SplitModel:
    """Build the student of a checkpoint folder from the architecture and weights in the checkpoint."""
    checkpoint = load_saved(path)
    saved = checkpoint.state["student"]
    generation = checkpoint.state.get("generation")
    try:
        student = split(model_of("its student", saved["architecture"], saved["attention"], generation))
    except UsageError as error:
        raise UsageError(f"checkpoint {path}: {error}") from error
    own = student.state_dict()
    weights = {
        name.removeprefix("student."): value
        for name, value in checkpoint.tensors.items()
        if name.startswith("student.")
    }
    if unknown := [
        entry
        for entry, value in weights.items()
        if entry not in own or (own[entry].shape, own[entry].dtype) != (value.shape, value.dtype)
    ]:
        raise RunError(
            f"checkpoint {path} does not fit student {saved['name']}: "
            f"{sorted(unknown)[0]} is unknown, or of another shape or type"
        )
    filled = {own[entry].data_ptr() for entry in weights}  # a tied weight is saved under one name
    if missing := [entry for entry, value in own.items() if value.data_ptr() not in filled]:
        raise RunError(f"checkpoint {path} lacks {missing[0]} of student {saved['name']}")
    with torch.no_grad():
        for entry, value in weights.items():
            own[entry].copy_(value)
    return student.to(device)


def tokenizer_of_run(run: Path) -> Path | None:
    """Return the tokenizer folder of a run's student, in the run; None where it is gone.

    UsageError: a link leads out of the run.
    """
    if not is_run(run):
        return None
    # not the cache that config.toml names: in a downloaded run that may be any folder of the user's
    places = (run / TOKENIZER, run / "data" / "tokenizer", run / "student")
    found = next((each for each in places if (each / "tokenizer.json").exists()), None)
    if found is not None:
        refuse_leading_out(found / "tokenizer.json", (run,))
    return found


def checkpoint_of(run: Path, wanted: str) -> Path:
    """Return the folder of a run's checkpoint; `best` means the newest where no checkpoint is best."""
    if not is_run(run):
        raise UsageError(f"{run} is not a run; give a folder that kdtrain distill wrote")
    store = Store(run / "checkpoints")
    if wanted == "best" and not (store.folder / "best").exists():
        wanted = "latest"
        log.info("%s has no best checkpoint yet; taking the newest", run)
    return store.choose(wanted)


def _run_of(checkpoint: Path) -> Path:
    return checkpoint.resolve().parent.parent
