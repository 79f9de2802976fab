"""`kdtrain export`: writes a trained student as a folder that `transformers.AutoModelForCausalLM` loads."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from kdtrain.cache.address import Address
from kdtrain.cache.build.card import CARD
from kdtrain.cache.hub import make_repository, names_in, upload
from kdtrain.cache.read.remote import read_small
from kdtrain.checkpoint.sealed import checkpoint_at, is_checkpoint, problem, read_checkpoint
from kdtrain.checkpoint.store import Store
from kdtrain.commands.model_card import cache_of, card_files, public
from kdtrain.config import ExportConfig
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.files import MEDIUM, files_below, parse_json, refuse_displacing, refuse_leading_out, typed
from kdtrain.models.adapters import lora_of, restrict
from kdtrain.models.head import SplitModel, split
from kdtrain.models.int8 import refuse_without_torchao
from kdtrain.models.loading import (
    ORIGIN,
    export_adapter,
    export_lock,
    export_model,
    generation_from,
    is_model_folder,
    load_student,
    model_of,
    refuse_foreign,
    tokenizer_files,
    with_weights_of,
)
from kdtrain.models.spec import ModelSpec, is_hub_id, paths_of, read_spec, shipped
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.monitor.tables import show
from kdtrain.ranks import is_main, on_main, process_group
from kdtrain.run.folder import TOKENIZER, is_run, refuse_no_folder
from kdtrain.run.result import read_result
from kdtrain.training.state import load_saved, read_saved


class _Origin(TypedDict):
    """What `kdtrain.json` of an export is read for."""

    files: dict[str, str]
    """Their SHA-256."""


def main(config: ExportConfig) -> int:
    """Write the student of a run's checkpoint into `config.out`; of several processes rank 0 does, the others wait.

    Raises:
        UsageError: there is no such run or checkpoint, `config.out` is not empty, or another process exports there.
        RunError: the checkpoint is damaged.
    """
    setup_logging(quiet=not is_main())
    with process_group(torch.device("cpu"), 600.0):  # seconds that the others wait for a sign of rank 0
        result = on_main(lambda: _export(config))
    show(f"export {result['student']}", result, config.json)
    return 0


def _export(config: ExportConfig) -> dict[str, Any]:
    """Export under the lock of the folder, and return what is shown."""
    refuse_no_folder(config.out)
    if config.quantize is not None:
        refuse_without_torchao()
    with export_lock(config.out):
        found = _read(config)
        if (where := config.push) is None:
            return _write(config, *found)
        repository = where.removeprefix("hf:")
        url = make_repository(where, repository, "model", config.private)
        earlier, card_stays = _there(where, repository)  # before minutes go into the folder
        result = _write(config, *found)
        log.info("%s is written; publishing it as %s", result["student"], where)
        files = files_below(Path(result["student"]))
        files = {name: path for name, path in files.items() if name != CARD or not card_stays}
        message, gone = f"Step {result['step']:,} by kdtrain", earlier - files.keys()
        return result | {"url": url, "commit": upload(where, repository, "model", files, message, gone)}


def _there(where: str, repository: str) -> tuple[set[str], bool]:
    """Files of an earlier export in a repository, and whether its card stays, since it is not the one of that export.

    UsageError: it holds something else.
    """
    names, address, ours = names_in(where, repository, "model"), Address(where, repository, kind="model"), {}
    if ORIGIN in names:
        try:
            ours = typed(parse_json(read_small(address, ORIGIN, MEDIUM).decode()), _Origin)["files"]
        except ValueError as error:
            raise UsageError(f"{where}: {ORIGIN} there is not what kdtrain writes ({error})") from None
    elif other := sorted(names - {".gitattributes", CARD}):
        raise UsageError(
            f"{where} holds {printable(other[0])}, which kdtrain did not publish; name another repository, "
            "which --push makes if it is missing"
        )
    stays = CARD in names and hashlib.sha256(read_small(address, CARD, MEDIUM)).hexdigest() != ours.get(CARD)
    if stays:
        log.warning("%s has a %s that kdtrain did not write; it stays as it is", where, CARD)
    return (ours.keys() & names) - {CARD}, stays


def _read(config: ExportConfig) -> tuple[Path, SplitModel, dict[str, Any], str]:
    """The checkpoint to export, its student and state, and the base of its adapters; refuses before any writing."""
    out, found = config.out, ""
    refuse_foreign(out)
    refuse_displacing(out, {"the run": config.run})
    if out.exists() and any(out.iterdir()) and not config.overwrite:
        raise UsageError(f"--out {out} holds an exported model; name another folder, or add --overwrite")
    named = None if config.base is None else read_spec(config.base)
    path, student, state = read_checkpoint(
        lambda: checkpoint_of(config.run, config.checkpoint),
        lambda path: (path, student_at(path, torch.device("cpu"), named), read_saved(path)),
    )
    if config.adapter and student.lora is None:
        raise UsageError(f"--adapter: the student of {config.run} has no adapter; leave it out")
    if config.base is not None and not student.frozen:
        raise UsageError(f"--base has no effect: {config.run} trained all weights; leave it out")
    if student.frozen:
        base = _base_spec(state, named)
        read = paths_of(config.base or state["options"]["run"]["student"])
        refuse_displacing(out, {f"its base {word}".strip(): path for word, path in read.items()})
        refuse_displacing(out, {"its base": base.source})  # also the folder of its --load
        if config.adapter:
            found = _findable(base, config.push is not None)
    return path, student, state, found


def _write(config: ExportConfig, path: Path, student: SplitModel, state: dict[str, Any], base: str) -> dict[str, Any]:
    """Write the folder, and return what is shown. What comes after `config` is of `_read`."""
    out = config.out
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
    parameters = written_parameters(student, config.adapter)
    weights = config.torch_dtype if config.quantize is None else f"int8, the rest {config.torch_dtype}"
    about: dict[str, Any] = {"parameters": parameters, "weights": weights, "adapter": config.adapter}
    card = card_files(out.name, run, state, license=config.license, **about)
    given: dict[str, Any] = {"dtype": config.torch_dtype, "origin": origin_of(run, state), "beside": card}
    if config.adapter:
        aside = export_adapter(student, base, tokenizer, out, **given)
    else:
        int8 = config.quantize is not None
        aside = export_model(student, tokenizer, out, **given, shard_gb=config.shard_size, int8=int8)
    out = out if out.exists() else out.resolve()  # missing/../x
    if aside:
        log.warning("%s held more than an export, and is now %s", out, aside)
    found = {"student": str(out), "checkpoint": path.name, "step": step, "parameters": parameters}
    if (kind := state["student"].get("weights")) is None:
        return found
    progress, merged = state["progress"], None
    loss = progress["last_loss"] if progress["validated_step"] == step else None
    if result is not None and result.get("best_step") == step:
        merged = result.get("merged_validation_loss")
    log.info("%s", merged_line(kind, loss, merged, str(out)))
    return found | {"base_weights": kind, "validation_loss": loss, "merged_validation_loss": merged}


def _findable(base: ModelSpec, published: bool) -> str:
    """The folder or hub id of the base of adapters. UsageError: `peft` could not find it."""
    if base.source is None or base.init != "pretrained":
        raise UsageError(
            f"--adapter: peft finds a base by its folder or hub id, and {base.name} is made by its spec; leave "
            "--adapter out for the merged model"
        )
    if published and (not is_hub_id(base.source) or Path(base.source).exists()):
        raise UsageError(
            f"--push: nobody else has {base.source}, the base of these adapters; publish that, and name it with "
            "--base ORG/NAME"
        )
    return base.source


def merged_line(kind: str, loss: float | None, merged: float | None, out: str) -> str:
    """Both validation losses of adapters that were trained beside packed weights; None: not measured."""
    trained = "not measured at this step" if loss is None else f"{loss:.4f}"
    other = f"measure that with kdtrain evaluate --student {out} --cache ..." if merged is None else f"{merged:.4f}"
    return f"validation loss beside the {kind} weights {trained}; merged into the whole ones, another model: {other}"


def written_parameters(student: SplitModel, adapter: bool = False) -> int:
    """The parameters of an export: of adapters alone, or of the model to whose weights they are added."""
    return sum(each.numel() for each in student.parameters() if student.lora is None or each.requires_grad == adapter)


def origin_of(run: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Where the student of a state of a run comes from, for the exported folder: of a mixture each cache."""
    members = [{key: public(value) for key, value in each.items()} for each in state.get("caches", ())]
    return {"cache": cache_of(run, state), "step": state["progress"]["step"]} | ({"caches": members} if members else {})


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
    if spec.init == "scratch":
        log.warning("%s is a spec of fresh weights, which nothing has trained; of a run, name its folder", name)
    return split(load_student(spec, vocab_size=None, seed=0, device=str(device))), spec.tokenizer or spec.source


def student_at(path: Path, device: torch.device, base: ModelSpec | None = None) -> SplitModel:
    """Build the student of a checkpoint folder from the architecture and weights in the checkpoint.

    base: the spec of the weights that the run did not train; by default the one that the run names.
    """
    checkpoint = load_saved(path)
    saved = checkpoint.state["student"]
    generation = checkpoint.state.get("generation")
    weights = {
        name.removeprefix("student."): value
        for name, value in checkpoint.tensors.items()
        if name.startswith("student.")
    }
    try:
        if "base" in saved:
            student = _on_its_base(checkpoint.state, weights, base)
        else:
            table, how = saved["architecture"], (saved["attention"], generation)
            student = split(model_of("its student", table, *how))
            entries = student.state_dict()
            if len(shared := entries.keys() & weights.keys()) > len({entries[name].data_ptr() for name in shared}):
                # an earlier version called a head of its own tied, as the configuration that it came with
                student = split(model_of("its student", table | {"tie_word_embeddings": False}, *how))
    except UsageError as error:
        raise UsageError(f"checkpoint {path}: {error}") from error
    own = {name: each for name, each in student.state_dict().items() if name not in student.frozen}
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


def _base_spec(state: Mapping[str, Any], base: ModelSpec | None) -> ModelSpec:
    """The spec of the weights that a run did not train: `base`, or the one that the run names, of which no code runs.

    A run may have been downloaded, and a spec with it.
    """
    if base is not None:
        return base
    options = state["options"]
    try:
        found = read_spec(typed(options.get("run", {}).get("student"), str))
        if found.trust_remote_code:
            raise UsageError(f"{found.name} has trust_remote_code = true, which a run is not asked for")
        folder = options.get("checkpoint", {}).get("load")
        if isinstance(folder, str) and is_model_folder(Path(folder)):
            found = with_weights_of(Path(folder), found)
        return found
    except (UsageError, ValueError) as error:
        text = "it holds only what was trained, and the rest is not there"
        raise UsageError(f"{text} ({error}); name its folder or spec with kdtrain export --base") from None


def _on_its_base(state: Mapping[str, Any], weights: Mapping[str, Any], base: ModelSpec | None) -> SplitModel:
    """A student whose checkpoint holds only what was trained, with the rest as it was when the run began.

    UsageError: the rest is not there, or has changed.
    """
    saved, lora = state["student"], None
    if "lora" in saved:
        lora = lora_of(saved["lora"], (name.removeprefix("model.") for name in weights), "its adapters")
    try:
        spec = replace(_base_spec(state, base), attention=saved["attention"])
        seed = typed(state["options"].get("run", {}).get("seed", 0), int)
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed = {seed}")
        size = saved["architecture"].get("vocab_size")
        size = None if size is None else typed(size, int)
    except ValueError as error:
        raise UsageError(f"it is not what a run writes: {printable(str(error))}") from None
    model = load_student(spec, vocab_size=size, seed=seed, device="cpu")
    if state.get("generation") and model.generation_config is not None:
        model.generation_config = generation_from("its student", state["generation"])
    student = split(model)
    restrict(student, lora, bool(saved.get("freeze_head")), seed=0)
    if student.base != saved["base"]:
        raise UsageError(
            f"it holds only what was trained, and the weights of {spec.name} ({student.base[:12]}) are not those that "
            f"it was trained with ({printable(saved['base'])[:12]}); name these with kdtrain export --base"
        )
    return student


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
