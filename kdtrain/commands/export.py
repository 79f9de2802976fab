"""`kdtrain export`: writes a trained student as a folder that `transformers.AutoModelForCausalLM` loads."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdtrain.checkpoint.sealed import read_checkpoint
from kdtrain.config.choices import EXPORTS
from kdtrain.config.commands import ExportConfig
from kdtrain.errors import UsageError, log
from kdtrain.files import refuse_displacing, refuse_no_folder
from kdtrain.imports import optional
from kdtrain.models.export import complete_generation, export_lock, export_model, whole_state
from kdtrain.models.head import SplitModel
from kdtrain.models.loading import whole_model
from kdtrain.models.spec import ModelSpec
from kdtrain.monitor.facts import read_result
from kdtrain.monitor.progress import setup_logging
from kdtrain.ranks import is_main, on_main, process_group
from kdtrain.run.model_card import card_files
from kdtrain.run.saved_student import (
    base_spec,
    checkpoint_of,
    merged_line,
    origin_of,
    run_of,
    student_at,
    tokenizer_of_run,
    written_parameters,
)
from kdtrain.training.state import read_saved


def main(config: ExportConfig) -> int:
    """Write the student of a run's checkpoint into `config.out`; of several processes rank 0 writes, the others wait.

    Raises:
        UsageError: there is no such run or checkpoint, `config.out` is not empty, or another process exports there.
        RunError: the checkpoint is damaged.
    """
    setup_logging(quiet=not is_main())

    def export() -> dict[str, Any]:
        refuse_no_folder(config.out)
        if config.quantize == "int8":
            optional("torchao", "fp8", "--quantize int8")
        with export_lock(config.out, {"the run": config.run}, overwrite=config.overwrite):
            return _write(config, *_read(config))

    with process_group(torch.device("cpu"), 600.0):  # seconds that the others wait for a sign of rank 0
        result = on_main(export)
    config.show(f"export {result['student']}", result)
    return 0


def _read(config: ExportConfig) -> tuple[Path, SplitModel, dict[str, Any], str]:
    """Read the checkpoint to export: its path, student, state and adapters' base; refuse before any writing."""
    out = config.out
    found = ""
    named = None if config.base is None else ModelSpec.read(config.base)
    path, student, state = read_checkpoint(
        lambda: checkpoint_of(config.run, config.checkpoint),
        lambda path: (path, student_at(path, torch.device("cpu"), named), read_saved(path)),
    )
    if config.adapter and student.lora is None:
        raise UsageError(f"--adapter: the student of {config.run} has no adapter; leave it out")
    if config.base is not None and not student.frozen:
        raise UsageError(f"--base has no effect: {config.run} trained all weights; leave it out")
    if student.frozen:
        base = base_spec(state, named)
        read = ModelSpec.paths_of(config.base or state["options"]["run"]["student"], "its base")
        refuse_displacing(out, read)
        refuse_displacing(out, {"its base": base.source})  # also the folder of its --load
        if config.adapter:
            if base.source is None or base.init != "pretrained":
                raise UsageError(
                    f"--adapter: peft finds a base by its folder or hub id, and {base.name} is made by its spec; leave "
                    "--adapter out for the merged model"
                )
            found = base.source
    return path, student, state, found


class Exported(NamedTuple):
    """The arguments of `export_model` that a format makes, and the facts to show."""

    config: ExportConfig
    student: SplitModel
    run: Path
    tokenizer: Path | None
    """The folder of its tokenizer."""
    base: str
    """The base of adapters that are written alone."""
    card: Any
    """`card_files`, which lacks the `weights` and what differs by format."""

    def model(self) -> Any:
        """Return the student as transformers has it, with the settings that its tokenizer brings."""
        model = whole_model(self.student).eval()
        if self.tokenizer is not None:
            complete_generation(model, self.tokenizer)
        return model

    def weights(self) -> dict[str, Tensor]:
        """Return its weights in the requested dtype, adapters added to them. UsageError: one is too large for it."""
        return whole_state(whole_model(self.student), getattr(torch, self.config.torch_dtype))


@EXPORTS.registers("safetensors", "")
def _folder(of: Exported) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prepare a folder for transformers: return the arguments of `export_model`, and the facts shown beside them."""
    config = of.config
    if of.tokenizer is None:
        text = "exported without a tokenizer: %s holds none; copy that of its student or teacher into %s"
        log.warning(text, of.run, config.out)
    weights = config.torch_dtype if config.quantize is None else f"int8, the rest {config.torch_dtype}"
    given: dict[str, Any] = {"tokenizer": of.tokenizer, "dtype": config.torch_dtype, "beside": of.card(weights=weights)}
    more = {"base": of.base} if config.adapter else {"shard_gb": config.shard_size, "int8": config.quantize is not None}
    return given | more, {}


def _write(config: ExportConfig, path: Path, student: SplitModel, state: dict[str, Any], base: str) -> dict[str, Any]:
    """Write the folder, and return the facts to show; the arguments after `config` come from `_read`."""
    out = config.out
    run = run_of(path)
    step = state["progress"]["step"]
    result = read_result(run)
    if result is not None and result["error"] is not None:
        log.warning("%s ended with an error (%s): this is its student of step %d", run, result["stop_reason"], step)
    parameters = written_parameters(student, config.adapter)
    about: dict[str, Any] = {"parameters": parameters, "adapter": config.adapter, "license": config.license}
    card = partial(card_files, out.name, run, state, **about)
    given, shown = EXPORTS.get(config.format)(Exported(config, student, run, tokenizer_of_run(run), base, card))
    aside = export_model(student, out=out, origin=origin_of(run, state), **given)
    out = out if out.exists() else out.resolve()  # missing/../x
    if aside:
        log.warning("%s held more than an export, and is now %s", out, aside)
    found = {"student": str(out), "checkpoint": path.name, "step": step, "parameters": parameters, **shown}
    if "next" in shown:
        log.info("Next: %s", shown["next"])
    if (kind := state["student"].get("weights")) is None:
        return found
    progress = state["progress"]
    merged = None
    loss = progress["last_loss"] if progress["validated_step"] == step else None
    if result is not None and result.get("best_step") == step:
        merged = result.get("merged_validation_loss")
    log.info("%s", merged_line(kind, loss, merged, str(out)))
    return found | {"base_weights": kind, "validation_loss": loss, "merged_validation_loss": merged}
