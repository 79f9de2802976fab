"""The student that a run or a checkpoint holds, built again on its base."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from kdtrain.checkpoint.sealed import checkpoint_at, is_checkpoint, problem, read_checkpoint
from kdtrain.checkpoint.store import Store
from kdtrain.errors import RunError, UsageError, log, printable
from kdtrain.files import refuse_leading_out, typed
from kdtrain.models.head import SplitModel, split
from kdtrain.models.loading import is_model_folder, load_student, model_of, with_weights_of
from kdtrain.models.spec import ModelSpec, shipped
from kdtrain.models.tokenizer import generation_from
from kdtrain.monitor.facts import is_run
from kdtrain.run.folder import TOKENIZER
from kdtrain.run.model_card import cache_of, public
from kdtrain.training.state import load_saved, read_saved


def merged_line(kind: str, loss: float | None, merged: float | None, out: str) -> str:
    """Describe both validation losses of adapters that were trained beside packed weights; None: not measured."""
    trained = "not measured at this step" if loss is None else f"{loss:.4f}"
    other = f"measure that with kdtrain evaluate --student {out} --cache ..." if merged is None else f"{merged:.4f}"
    return f"validation loss beside the {kind} weights {trained}; merged into the whole ones, another model: {other}"


def written_parameters(student: SplitModel, adapter: bool = False) -> int:
    """Count the parameters of an export: of adapters alone, or of the model to whose weights they are added."""
    return sum(each.numel() for each in student.parameters() if student.lora is None or each.requires_grad == adapter)


def origin_of(run: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the student of a run's state comes from, for the exported folder: of a mixture each cache."""
    members = [{key: public(value) for key, value in each.items()} for each in state.get("caches", ())]
    return {"cache": cache_of(run, state), "step": state["progress"]["step"]} | ({"caches": members} if members else {})


Kind = Literal["students", "teachers"]
"""Whose names ship."""


class OpenedStudent(NamedTuple):
    """A student, loaded."""

    student: SplitModel
    tokenizer: Path | str | None
    """The place of its tokenizer."""
    checkpoint: Path | None = None
    """The checkpoint that it was read from."""

    @property
    def step(self) -> int | None:
        """The step of that checkpoint."""
        return None if self.checkpoint is None else int(read_saved(self.checkpoint)["progress"]["step"])


def tokenizer_place(name: str, kind: Kind = "students") -> Path | str | None:
    """Return where the tokenizer of a student that is not loaded lies, as `open_student` names it; None without one."""
    path = Path(name)
    ships = name in shipped(kind)
    if not ships and (is_run(path) or is_checkpoint(path.resolve())):
        return tokenizer_of_run(path if is_run(path) else run_of(path))
    spec = ModelSpec.read(name, kind)
    return spec.tokenizer or spec.source


def open_student(name: str, device: torch.device, kind: Kind = "students") -> OpenedStudent:
    """Load a student.

    Args:
        name: a run (its best checkpoint, or the newest where none is best), a checkpoint, or a model spec. A bare name
            that ships is the student that ships, as in `ModelSpec.read`; `./NAME` is a folder.
        device: the student's device.
        kind: whose names ship.
    """
    path = Path(name)
    ships = name in shipped(kind)
    tokenizer = tokenizer_place(name, kind)
    if not ships and is_checkpoint(path.resolve()):

        def read(found: Path) -> OpenedStudent:
            if (damage := problem(found)) is not None:
                raise RunError(f"checkpoint {path} is damaged: {damage}")
            return OpenedStudent(student_at(found, device), tokenizer, found)

        return read_checkpoint(lambda: checkpoint_at(path), read)
    if not ships and is_run(path):
        return read_checkpoint(
            lambda: checkpoint_of(path, "best"),
            lambda found: OpenedStudent(student_at(found, device), tokenizer, found),
        )
    spec = ModelSpec.read(name, kind)
    if spec.init == "scratch":
        log.warning("%s is a spec of fresh weights, which nothing has trained; of a run, name its folder", name)
    loaded = split(load_student(spec, vocab_size=None, seed=0, device=str(device)))
    return OpenedStudent(loaded, tokenizer)


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
            table = saved["architecture"]
            how = (saved["attention"], generation)
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


def base_spec(state: Mapping[str, Any], base: ModelSpec | None) -> ModelSpec:
    """Return the spec of the weights that a run did not train: `base`, or the run's own, of which no code runs.

    A run may have been downloaded, and a spec with it.
    """
    if base is not None:
        return base
    options = state["options"]
    try:
        found = ModelSpec.read(typed(options.get("run", {}).get("student"), str))
        if found.trust_remote_code:
            raise UsageError(f"{found.name} has trust_remote_code = true, which a run may not turn on")
        folder = options.get("checkpoint", {}).get("load")
        if isinstance(folder, str) and is_model_folder(Path(folder)):
            found = with_weights_of(Path(folder), found)
        return found
    except (UsageError, ValueError) as error:
        text = "it holds only what was trained, and the rest is not there"
        raise UsageError(f"{text} ({error}); name its folder or spec with kdtrain export --base") from None


def _on_its_base(state: Mapping[str, Any], weights: Mapping[str, Any], base: ModelSpec | None) -> SplitModel:
    """Build a student whose checkpoint holds only what was trained, with the rest as it was when the run began.

    UsageError: the rest is not there, or has changed.
    """
    from kdtrain.models.adapters import lora_of, restrict

    saved = state["student"]
    lora = None
    if "lora" in saved:
        lora = lora_of(saved["lora"], (name.removeprefix("model.") for name in weights), "its adapters")
    try:
        spec = replace(base_spec(state, base), attention=saved["attention"])
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


def start_of(store: Store, wanted: str, warn: Callable[[str], object]) -> Path | None:
    """Return the checkpoint from which `--resume` starts; None: from the beginning. warn: takes a damaged one."""
    if not store.may_begin(wanted):
        return store.choose(wanted)
    name, damaged = store.newest_valid()
    for text in damaged:
        warn(text)
    return None if name is None else store.path(name)


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint belongs to."""
    return checkpoint.resolve().parent.parent
