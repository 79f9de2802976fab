"""TensorBoard, Weights & Biases, and the command of `--on-event`.

After a rollback TensorBoard drops the numbers and histograms of the undone steps and keeps their texts; W&B cannot, and
shows both attempts over the same steps.
"""

import importlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdtrain.config.choices import register_observer
from kdtrain.errors import RunError, UsageError
from kdtrain.files import read_json
from kdtrain.imports import optional
from kdtrain.monitor.loggers import Logger, register_logger

METRICS = ("train/loss", "validation/loss", "validation/kl")
"""The metrics beside the hyper-parameters in TensorBoard."""


@register_logger("tensorboard", help="event files in the run's folder tensorboard/")
class TensorBoard(Logger):
    """Event files in `tensorboard/` of the run; readers drop the steps after `resume_step` of an earlier process."""

    @classmethod
    def ready(cls, text: str) -> None:
        if text:
            raise UsageError(f"--log-to tensorboard:{text}: tensorboard takes no text; use --log-to tensorboard")
        optional("tensorboard", "tensorboard", "--log-to tensorboard")

    def __init__(self, folder: Path, text: str, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        board = folder / "tensorboard"
        # readers take files by name: whole seconds, then numbers of any width
        while any(board.glob(f"events.out.tfevents.{int(time.time())}.*")):
            time.sleep(0.05)
        self.writer = SummaryWriter(str(board), purge_step=resume_step + 1 if resume_step else 0)

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def histograms(self, step: int, found: Mapping[str, Any]) -> None:
        for name, each in found.items():
            self.writer.add_histogram_raw(name, **vars(each), global_step=step)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
        shown = [[text.replace("|", "\\|").replace("\n", "<br>") for text in cells] for cells in lines]
        self.writer.add_text(name, "\n".join(f"| {' | '.join(cells)} |" for cells in shown), step)

    def event(self, step: int, kind: str, details: Mapping[str, Any]) -> None:
        text = ", ".join(f"{name}: {value}" for name, value in details.items())
        self.writer.add_text("events", f"{kind} {text}".strip(), step)

    def hyperparameters(self, options: Mapping[str, bool | float | str]) -> None:
        from torch.utils.tensorboard.summary import hparams

        # add_hparams would write a second run
        for summary in hparams(dict(options), dict.fromkeys(METRICS, 0.0)):
            self.writer._get_file_writer().add_summary(summary)

    def rewind(self, step: int) -> None:
        """Write a mark at which readers drop the steps after `step`."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        mark = Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        self.writer._get_file_writer().add_event(mark)

    def close(self) -> None:
        self.writer.close()


@register_logger("wandb", help="wandb:PROJECT, a run of Weights & Biases; needs the package wandb")
class WeightsAndBiases(Logger):
    """A run of W&B in the project `text`, which resumes together with ours; its id is in `wandb.json`.

    The step is a metric of its own, because W&B's own step must not decrease, and ours does after a rollback.
    """

    @classmethod
    def ready(cls, text: str) -> None:
        try:
            importlib.import_module("wandb")
        except Exception as error:  # a package of another Python or protobuf fails in its own ways
            if isinstance(error, ModuleNotFoundError) and error.name == "wandb":
                raise UsageError("--log-to wandb needs the package wandb; pip install 'kdtrain[wandb]'") from None
            raise UsageError(f"--log-to wandb: the package wandb does not load: {error}") from None

    def __init__(self, folder: Path, text: str, resume_step: int) -> None:
        from kdtrain.monitor.record import RunRecord
        from kdtrain.outputs import OutFolder

        self.wandb: Any = importlib.import_module("wandb")
        identity = folder / "wandb.json"
        sweep = RunRecord.arm_of(folder)
        known = None
        if resume_step:
            with suppress(OSError, ValueError, KeyError):  # without an id, W&B makes a new one
                known = str(read_json(identity, dict[str, str])["id"])
        try:
            self.run = self.wandb.init(
                project=text or None,  # W&B reads WANDB_PROJECT then
                name=os.environ.get("WANDB_NAME") or "/".join([*sweep[1:], folder.resolve().name]),
                group=os.environ.get("WANDB_RUN_GROUP") or "/".join(sweep) or None,
                tags=None if "WANDB_TAGS" in os.environ else [each[:64] for each in sweep],
                id=known,
                resume="allow",
                dir=str(folder),
                settings=self.wandb.Settings(console="off"),
            )
        except Exception as error:
            raise RunError(
                f"W&B did not start: {error}; log in with wandb login, set WANDB_MODE=offline, "
                "or leave wandb out of --log-to"
            ) from None
        OutFolder(folder).publish(identity.name, json.dumps({"id": self.run.id}) + "\n", "monitor.wandb")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log({"step": step, **numbers})

    def histograms(self, step: int, found: Mapping[str, Any]) -> None:
        shown = {  # W&B also needs the lowest edge
            name: self.wandb.Histogram(
                np_histogram=(each.bucket_counts, [min(each.min, each.bucket_limits[0]), *each.bucket_limits])
            )
            for name, each in found.items()
        }
        self.run.log({"step": step, **shown})

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        table = self.wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({"step": step, name: table})

    def event(self, step: int, kind: str, details: Mapping[str, Any]) -> None:
        self.run.log({"step": step, f"events/{kind}": 1})

    def hyperparameters(self, options: Mapping[str, bool | float | str]) -> None:
        self.run.config.update(dict(options), allow_val_change=True)

    def rewind(self, step: int) -> None:
        """Log a mark: W&B keeps the later steps."""
        self.run.log({"step": step, "events/rewind": 1})

    def close(self) -> None:
        self.run.finish()


@register_observer("on-event")
def command(request: Any) -> Any:
    """Return the command of --on-event, which gets the events of a run, or None without it."""
    given = request.config.monitor.on_event
    if given is None:
        return None
    from kdtrain.plugins.loggers.on_event import EventCommand

    return EventCommand(given, str(request.config.out))
