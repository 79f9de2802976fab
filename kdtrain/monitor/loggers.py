"""TensorBoard, and Weights & Biases if its package is installed; and the histograms that both show.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from kdtrain.errors import RunError, UsageError
from kdtrain.files import publish_text, read_json
from kdtrain.ranks import agreed_max, all_reduce_sum, copies, local

_MAGNITUDES = torch.pow(2.0, torch.arange(-60, 21) / 2.0)
EDGES = torch.cat([-_MAGNITUDES.flip(0), _MAGNITUDES])
_BINS = len(EDGES) + 1
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Histogram:
    """Counts of the finite numbers of one tensor; `broken` counts the non-finite ones."""

    minimum: float
    maximum: float
    count: int
    total: float
    squares: float
    """Sum of the squares."""
    broken: int
    limits: list[float]
    """Upper edges of the bins, ascending, without empty bins at either end."""
    counts: list[int]
    """Numbers in each bin, as many as `limits`."""


def histograms(tensors: Mapping[str, torch.Tensor]) -> dict[str, Histogram]:
    """The histogram of each tensor of any float dtype, on any device; leaves out tensors without a finite number.

    If one tensor is sharded, all must be, and every rank must call this.
    """
    filled = {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}
    if not filled:
        return {}
    rows = torch.stack([_row(local(tensor)).cpu() for tensor in filled.values()])
    if number := copies(next(iter(filled.values()))):
        rows = torch.cat([all_reduce_sum(rows[:, :-2]) / number, agreed_max(rows[:, -2:])], dim=1)
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
    first, last = used[0], used[-1]
    broken, total, squares, lowest, maximum = row[_BINS:]
    limits = [*EDGES.tolist(), max(maximum, float(EDGES[-1]) * 2)]
    return Histogram(
        minimum=-lowest,
        maximum=maximum,
        count=sum(counts),
        total=total,
        squares=squares,
        broken=int(broken),
        limits=limits[first : last + 1],
        counts=counts[first : last + 1],
    )


METRICS = ("train/loss", "validation/loss", "validation/kl")
"""The metrics beside the hyper-parameters in TensorBoard."""


class Logger(Protocol):
    """A place that shows numbers, histograms and text by step."""

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None: ...

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None: ...

    def event(self, step: int, kind: str, details: Mapping[str, Any]) -> None: ...

    def hyperparameters(self, options: Mapping[str, bool | float | str]) -> None: ...

    def rewind(self, step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `folder`.

    Args:
        folder: `runs/NAME/tensorboard`.
        first_step: the first step to be written; readers drop later steps of an earlier process.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers by their full name."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Histograms by their full name."""
        for name, each in found.items():
            self.writer.add_histogram_raw(
                name,
                min=each.minimum,
                max=each.maximum,
                num=each.count,
                sum=each.total,
                sum_squares=each.squares,
                bucket_limits=each.limits,
                bucket_counts=each.counts,
                global_step=step,
            )

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Rows of text, the columns by the keys of the first one, as a Markdown table."""
        lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
        shown = [[text.replace("|", "\\|").replace("\n", "<br>") for text in cells] for cells in lines]
        self.writer.add_text(name, "\n".join(f"| {' | '.join(cells)} |" for cells in shown), step)

    def event(self, step: int, kind: str, details: Mapping[str, Any]) -> None:
        """An intervention, as text."""
        text = ", ".join(f"{name}: {value}" for name, value in details.items())
        self.writer.add_text("events", f"{kind} {text}".strip(), step)

    def hyperparameters(self, options: Mapping[str, bool | float | str]) -> None:
        """The options of the run, for the tab HPARAMS."""
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
        """Flush and close the file."""
        self.writer.close()


def require_wandb(project: str | None) -> Any:
    """The module `wandb` if a project is named, else None.

    Raises:
        UsageError: the package is missing or broken.
    """
    if project is None:
        return None
    try:
        return importlib.import_module("wandb")
    except Exception as error:  # a package of another Python or protobuf fails in its own ways
        if isinstance(error, ModuleNotFoundError) and error.name == "wandb":
            raise UsageError("--wandb-project needs the package wandb; pip install 'kdtrain[wandb]'") from None
        raise UsageError(f"--wandb-project: the package wandb does not load: {error}") from None


class WeightsAndBiases:
    """A run of W&B, which resumes together with ours.

    The step is a metric of its own, because W&B's own step must not decrease, and ours does after a rollback.

    Args:
        folder: our run, with the files of W&B in `wandb/` and its run id in `wandb.json`.
        fresh: whether our run is new; then the run of W&B is new too.
        project, name: for W&B; the name is the folder's if not given.
    """

    def __init__(self, folder: Path, fresh: bool, project: str, name: str | None) -> None:
        self.wandb = require_wandb(project)
        identity = folder / "wandb.json"
        known = None
        if not fresh:
            with suppress(OSError, ValueError, KeyError):  # without an id, W&B makes a new one
                known = str(read_json(identity, dict[str, str])["id"])
        try:
            self.run = self.wandb.init(
                project=project,
                name=name or folder.resolve().name,
                id=known,
                resume="allow",
                dir=str(folder),
                settings=self.wandb.Settings(console="off"),
            )
        except Exception as error:
            raise RunError(
                f"W&B did not start: {error}; log in with wandb login, set WANDB_MODE=offline, "
                "or leave out --wandb-project"
            ) from None
        publish_text(identity, json.dumps({"id": self.run.id, "project": project}) + "\n", "monitor.wandb")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers by their full name."""
        self.run.log({"step": step, **numbers})

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Histograms by their full name; W&B also needs the lowest edge."""
        shown = {
            name: self.wandb.Histogram(np_histogram=(each.counts, [min(each.minimum, each.limits[0]), *each.limits]))
            for name, each in found.items()
        }
        self.run.log({"step": step, **shown})

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Rows of text, the columns by the keys of the first one."""
        table = self.wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({"step": step, name: table})

    def event(self, step: int, kind: str, details: Mapping[str, Any]) -> None:
        """An intervention, as a mark at its step."""
        self.run.log({"step": step, f"events/{kind}": 1})

    def hyperparameters(self, options: Mapping[str, bool | float | str]) -> None:
        """The options of the run."""
        self.run.config.update(dict(options), allow_val_change=True)

    def rewind(self, step: int) -> None:
        """Log a mark: W&B keeps the later steps."""
        self.run.log({"step": step, "events/rewind": 1})

    def close(self) -> None:
        """Upload the rest and finish the run."""
        self.run.finish()
