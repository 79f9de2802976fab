"""Importance scores of a teacher's parts on the tokens of a cache, for pruning (`cut`), kept in a file.

After Minitron (arXiv 2407.14679, section 2.2), by forwards alone:

    a head       the L2 norm of its output, in front of the attention's output projection
    a neuron     its absolute activation, in front of the MLP's down projection
    a channel    the absolute output of each norm that reads it, summed over the norms of the layers that stay
    a layer      the mean cross-entropy of the teacher without it (its output is its input), in nats a label

Each of the first three is averaged over the positions of a sequence, then the root of the mean square is taken over the
sequences: the paper's choice among nine ways (sequence: mean, batch: L2). The share of each channel in the mean square
in front of each norm is measured beside them. Every position counts, for the loss those of the loss mask.

The file is safetensors, fp64, with a JSON record in its header: whose scores these are, how many sequences are done and
a digest. It is written after the first batch, which finds a folder that cannot be written, and then every `EVERY`
seconds; a killed command resumes from it to the same bits. Layers are scored only when a shape has fewer.

Shape suffixes: B sequences, T positions, H heads, D channels, X numbers of a head.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from einops import rearrange
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kdtrain.cache.read.reader import CacheReader
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.files import json_digest, open_regular, typed
from kdtrain.objective.loss import DistillationLoss
from kdtrain.outputs import OutFolder
from kdtrain.plugins.prune.cut import Importance, Roles, Shape
from kdtrain.teaching.local import LocalTeacher

EVERY = 20.0
"""Seconds between two writes of an unfinished file."""
_MOST = 2**28
"""Bytes of a file of scores, at most."""
_RECORD = "kdtrain"
"""The entry of the file's header that holds the record."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of scores: scores of another subject are not reused."""

    teacher: str
    """Digest of weights and architecture."""
    cache: str
    """Digest of the cache."""
    sequences: int
    """Of its train split, at equal distances."""
    precision: str
    """Of the forwards."""

    @property
    def key(self) -> str:
        """A short name of the subject."""
        return json_digest(asdict(self))[:12]


@dataclass(frozen=True, kw_only=True)
class _Record:
    subject: Subject
    width: Annotated[int, Meta(ge=0)]
    """Sequences that are scored for heads, neurons and channels."""
    depth: Annotated[int, Meta(ge=0)]
    """The same for layers."""
    digest: str


_SUBJECT = [each.name for each in fields(Subject)]


class Scores:
    """The scores of a teacher in a file, which is made where it is missing.

    path: in an existing folder; the caller keeps others away. roles, shape: the teacher's.

    UsageError: the file holds something else, is damaged, or has the scores of another subject.
    """

    def __init__(self, path: Path, subject: Subject, roles: Roles, shape: Shape) -> None:
        self.path, self.subject, self.roles, self.shape = path, subject, roles, shape
        self.done = {"width": 0, "depth": 0}
        layers = list(range(shape.layers))
        sizes = {"losses": shape.layers + 1, "labels": 1}
        sizes |= {f"{kind}.{each}": getattr(shape, kind) for each in layers for kind in ("heads", "neurons")}
        sizes |= {f"output.{name}": shape.width for name in roles.reading_norms(layers)}
        sizes |= {f"share.{name}": shape.width for name in roles.all_norms(shape.layers)}
        self._sums = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
        self._written = -math.inf
        if path.exists():
            self._read()

    def complete(self, teacher: LocalTeacher, reader: CacheReader, batch: int, depth: bool, shown: Any) -> None:
        """Score the missing sequences, one batch after the other; `depth`: the layers too.

        shown: a progress bar, over `work(depth)`.
        """
        self._sums = {name: each.to(teacher.device) for name, each in self._sums.items()}
        rows = spread(len(reader), self.subject.sequences)
        for part, how in (("width", self._score_width), ("depth", self._score_layers)):
            while (part == "width" or depth) and self.done[part] < len(rows):
                chosen = rows[self.done[part] : self.done[part] + batch]
                how(teacher, texts(reader, chosen))
                self.done[part] += len(chosen)
                shown.update(self.work(depth, done=True))
                if self.done[part] == len(rows) or time.monotonic() - self._written > EVERY:
                    self._write()

    def work(self, depth: bool, done: bool = False) -> int:
        """Count forwards of a sequence, all of them or, with `done`, those that are done."""
        passes = {"width": 1, "depth": self.shape.layers + 1 if depth else 0}
        return sum(many * (self.done[part] if done else self.subject.sequences) for part, many in passes.items())

    def importance(self) -> Importance:
        """Return the scores of all sequences; those of layers only where they are complete.

        RunError: a score is non-finite, or no token is a label, by which layers are scored.
        """
        count = self.subject.sequences
        assert self.done["width"] == count
        sums = {name: each.cpu() for name, each in self._sums.items()}
        if self.done["depth"] == count and not sums["labels"].item():
            raise RunError("no token of these sequences is a label, by which layers are scored; take a larger number")
        if odd := [name for name, each in sums.items() if not each.isfinite().all()]:
            raise RunError(f"the scores {odd[0]} are non-finite; look at the teacher's weights")

        def of(kind: str) -> dict[str, Tensor]:
            return {
                name.removeprefix(f"{kind}."): each / count
                for name, each in sums.items()
                if name.startswith(f"{kind}.")
            }

        heads, neurons = (torch.stack([*of(kind).values()]).sqrt() for kind in ("heads", "neurons"))
        outputs = {name: each.sqrt() for name, each in of("output").items()}
        losses = (sums["losses"] / sums["labels"])[:-1] if self.done["depth"] == count else None
        return Importance(heads, neurons, outputs, of("share"), losses)

    def _score_width(self, teacher: LocalTeacher, text: dict[str, Tensor]) -> None:
        """Add what a forward shows in front of and behind the modules to the sums."""
        model = teacher.model.model
        roles = self.roles
        layers = list(range(self.shape.layers))

        def squared(value_BTX: Tensor) -> Tensor:
            return value_BTX.abs().mean(1).double().square().sum(0)

        def heads(value: Tensor) -> Tensor:
            return squared(rearrange(value, "B T (H X) -> B T H X", X=self.shape.head_dim).norm(dim=-1))

        def share(value_BTD: Tensor, centred: bool) -> Tensor:
            squares_BTD = (value_BTD - value_BTD.mean(-1, keepdim=True) * centred).square()
            shares_BTD = squares_BTD / squares_BTD.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            return shares_BTD.mean(1).double().sum(0)

        def watch(module: str, name: str, of: Callable[[Tensor], Tensor], output: bool = False) -> None:
            def add(_: nn.Module, inputs: tuple[Tensor, ...], value: Tensor | None = None) -> None:
                self._sums[name] += of((inputs[0] if value is None else value).float())

            own = model.get_submodule(module)
            hook = own.register_forward_hook(add) if output else own.register_forward_pre_hook(add)
            hooks.callback(hook.remove)

        with ExitStack() as hooks:
            for each in layers:
                for kind, name, look in zip(("heads", "neurons"), roles.writes, (heads, squared), strict=True):
                    watch(f"{roles.layers}.{each}.{name}", f"{kind}.{each}", look)
            for name in roles.all_norms(self.shape.layers):
                centred = isinstance(model.get_submodule(name), nn.LayerNorm)
                watch(name, f"share.{name}", partial(share, centred=centred))
            for name in roles.reading_norms(layers):
                watch(name, f"output.{name}", squared, output=True)
            teacher.hidden_states(text["tokens"][:, :-1], text.get("segments"))

    def _score_layers(self, teacher: LocalTeacher, text: dict[str, Tensor]) -> None:
        def skip(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            return (inputs[0], *output[1:]) if isinstance(output, tuple) else inputs[0]

        for layer in range(self.shape.layers):
            hook = teacher.model.model.get_submodule(f"{self.roles.layers}.{layer}").register_forward_hook(skip)
            try:
                self._sums["losses"][layer] += cross_entropy(teacher, text)[0]
            finally:
                hook.remove()
        loss, labels = cross_entropy(teacher, text)
        self._sums["losses"][-1] += loss
        self._sums["labels"] += labels

    def _read(self) -> None:
        try:
            with open_regular(self.path) as file:
                if file.seek(0, 2) > _MOST:
                    raise ValueError("it is too large")
            with safe_open(self.path, framework="pt") as opened:
                record = typed(json.loads((opened.metadata() or {}).get(_RECORD, "null")), _Record)
                found = asdict(record.subject).items() - asdict(self.subject).items()
                tensors = {} if found else {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            reason = printable(str(error))[:200]
            raise UsageError(f"{self.path} holds no scores ({reason}); name another file") from None
        if different := [each.replace("sequences", "number of sequences") for each in _SUBJECT if each in dict(found)]:
            raise UsageError(f"{self.path} has the scores of another {' and '.join(different)}; name another file")
        like = {name: (each.shape, each.dtype) for name, each in self._sums.items()}
        fits = like == {name: (each.shape, each.dtype) for name, each in tensors.items()}
        done = {"width": record.width, "depth": record.depth}
        if not fits or record.digest != _digest(done, tensors) or max(done.values()) > self.subject.sequences:
            raise UsageError(f"{self.path} is damaged: its scores are not those of its record; remove it")
        self.done, self._sums = done, tensors

    def _write(self) -> None:
        tensors = {name: each.cpu() for name, each in self._sums.items()}
        record = {"subject": asdict(self.subject), **self.done, "digest": _digest(self.done, tensors)}
        with OutFolder(self.path.parent).published(self.path.name, "prune.scores") as temporary:
            save_file(tensors, temporary, {_RECORD: _spelled(record)})
        self._written = time.monotonic()


def spread(available: int, wanted: int) -> list[int]:
    """Choose `wanted` of `available` rows, at equal distances."""
    return [row * available // wanted for row in range(wanted)]


def texts(reader: CacheReader, rows: list[int]) -> dict[str, Tensor]:
    """Read `tokens` [B, T+1], `loss_mask` [B, T] and, where the cache keeps documents apart, `segments` [B, T]."""
    found = reader.text(rows)
    text = {name: torch.from_numpy(found[name].astype(np.int64)) for name in ("tokens", "segments")}
    if not reader.manifest.settings.document_mask:
        del text["segments"]
    return {**text, "loss_mask": torch.from_numpy(found["loss_mask"].astype(bool))}


def cross_entropy(teacher: LocalTeacher, text: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum the cross-entropy over the labels that count, and return it with their number."""
    tokens_BT, mask_N = text["tokens"].to(teacher.device), text["loss_mask"].flatten().to(teacher.device)
    with torch.no_grad():
        hidden_BTD, _ = teacher.hidden_states(tokens_BT[:, :-1], text.get("segments"))
        hidden_ND = rearrange(hidden_BTD, "B T D -> (B T) D")
        labels_N = tokens_BT[:, 1:].flatten()
        found = DistillationLoss(alpha=0.0)(
            hidden_ND, teacher.head, labels_N, mask_N, None, vocab_size=teacher.vocab_size, normalizer=1.0
        )
    return found.ce.double(), mask_N.sum()


def mean_loss(teacher: LocalTeacher, reader: CacheReader, sequences: int, batch: int) -> float:
    """Compute the mean cross-entropy on `sequences` of a split, in nats a label."""
    rows = spread(len(reader), sequences)
    loss = 0.0
    labels = 0
    for start in range(0, len(rows), batch):
        found = cross_entropy(teacher, texts(reader, rows[start : start + batch]))
        loss, labels = loss + float(found[0]), labels + int(found[1])
    return loss / max(labels, 1)


def _spelled(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(done: Mapping[str, int], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(_spelled(done).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
