"""Loggers, which show a run by step: TensorBoard, Weights & Biases, and what `register_logger` adds; and histograms.

After a rollback TensorBoard drops the numbers and histograms of the undone steps and keeps their texts; W&B cannot, and
shows both attempts over the same steps.

Histograms of weights and gradients are counted on the device of each tensor. The bins are the same for every tensor,
step and rank: half octaves of magnitude, for both signs, from 2^-30 to 2^10, with one bin around 0. Weights and
gradients span many orders of magnitude, which even bins would put into one. Fixed bins need no pass for the extremes,
so the counts of a tensor's parts add up. What it gives up: the extreme bins are open, and numbers that differ by less
than 40 % may share a bin.
"""

import importlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kdtrain.config.choices import LOGGERS
from kdtrain.errors import RunError, UsageError
from kdtrain.files import publish_text, read_json
from kdtrain.imports import optional
from kdtrain.monitor.record import arm_of
from kdtrain.ranks import agreed_max, all_reduce_sum, copies, local, world_size

_MAGNITUDES = torch.pow(2.0, torch.arange(-60, 21) / 2.0)
EDGES = torch.cat([-_MAGNITUDES.flip(0), _MAGNITUDES])
_BINS = len(EDGES) + 1
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Histogram:
    """Counts of the finite numbers of one tensor, by the names of TensorBoard's `add_histogram_raw`."""

    min: float
    max: float
    num: int
    sum: float
    sum_squares: float
    bucket_limits: list[float]
    """Upper edges of the bins, ascending, without empty bins at either end."""
    bucket_counts: list[int]
    """Numbers in each bin, as many as `bucket_limits`."""


def histograms(tensors: Mapping[str, torch.Tensor]) -> dict[str, Histogram]:
    """The histogram of each tensor of any float dtype, on any device; leaves out tensors without a finite number.

    If one tensor is sharded, every rank must call this; one that is not is the same on each rank.
    """
    filled = {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}
    if not filled:
        return {}
    rows = torch.stack([_row(local(tensor)).cpu() for tensor in filled.values()])
    if any(numbers := [copies(tensor) for tensor in filled.values()]):
        each = torch.tensor([number or world_size() for number in numbers], dtype=rows.dtype)[:, None]
        rows = torch.cat([all_reduce_sum(rows[:, :-2]) / each, agreed_max(rows[:, -2:])], dim=1)
    return {name: _histogram(row) for name, row in zip(filled, rows.tolist(), strict=True) if sum(row[:_BINS])}


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """Counts of the bins and of non-finite numbers, sum, sum of squares, -minimum, maximum: fp64, on the device."""
    edges = EDGES.to(tensor.device)
    counts = torch.zeros(_BINS + 1, dtype=torch.int64, device=tensor.device)
    sums = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    ends = torch.tensor([-torch.inf, -torch.inf], dtype=torch.float64, device=tensor.device)
    for part in tensor.reshape(-1).split(_CHUNK) if tensor.numel() else ():
        values = part.float()
        sound = values.isfinite()
        places = torch.where(sound, torch.bucketize(values, edges), _BINS)
        counts += torch.bincount(places, minlength=_BINS + 1)
        clean = values.where(sound, 0.0).double()
        sums += torch.stack([clean.sum(), clean.square().sum()])
        ends = ends.maximum(
            torch.stack([(-values).where(sound, -torch.inf).max(), values.where(sound, -torch.inf).max()])
        )
    return torch.cat([counts.double(), sums, ends])


def _histogram(row: list[float]) -> Histogram:
    counts = [int(count) for count in row[:_BINS]]
    used = [place for place, count in enumerate(counts) if count]
    shown = slice(used[0], used[-1] + 1)
    _, total, squares, lowest, highest = row[_BINS:]
    limits = [*EDGES.tolist(), max(highest, float(EDGES[-1]) * 2)]
    return Histogram(-lowest, highest, sum(counts), total, squares, limits[shown], counts[shown])


METRICS = ("train/loss", "validation/loss", "validation/kl")
"""The metrics beside the hyper-parameters in TensorBoard."""


class Logger:
    """A place that shows a run by step; a logger overrides what it can show. Rank 0 alone makes one.

    Args:
        folder: the run.
        text: what follows the name and a colon in `--log-to`, or "".
        resume_step: the step from which the run resumes; 0 for a new run.
    """

    def __init__(self, folder: Path, text: str, resume_step: int) -> None: ...

    @classmethod
    def ready(cls, text: str) -> None:
        """Raise a `UsageError` if it cannot be used here; called on every rank before anything is written."""

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers by their full name."""

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Histograms by their full name."""

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """At least one row of text; the columns are the keys of the first one."""

    def event(self, step: int, kind: str, details: Mapping[str, Any]) -> None:
        """An intervention or a warning."""

    def hyperparameters(self, options: Mapping[str, bool | float | str]) -> None:
        """The options of the run."""

    def rewind(self, step: int) -> None:
        """The steps after `step` are undone."""

    def close(self) -> None:
        """Finish what is to be written."""


def register_logger(name: str, *, help: str = "") -> Callable[[type[Logger]], type[Logger]]:
    """Decorator: add a subclass of `Logger` as `--log-to NAME` or `NAME:TEXT`.

    A package does so in the module that its entry point of group `kdtrain.loggers` names (kdtrain.registry).

    Args:
        name: the name that users type.
        help: its line in `--help`; by default the first line of the class's docstring.
    """
    return LOGGERS.registers(name, help)


@register_logger("tensorboard")
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

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
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


@register_logger("wandb")
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
        self.wandb: Any = importlib.import_module("wandb")
        identity = folder / "wandb.json"
        sweep = arm_of(folder)
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
        publish_text(identity, json.dumps({"id": self.run.id}) + "\n", "monitor.wandb")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log({"step": step, **numbers})

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
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
