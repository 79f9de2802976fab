"""Reads views: a cache in the rows of a student with another tokenizer, as `view_builder` makes them.

Shapes: n rows, T positions, V entries of the teacher's tokenizer, S of the student's, C cells, K entries.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.recfunctions import rename_fields
from torch import Tensor

from kdtrain.cache.format.names import CELLS
from kdtrain.cache.read.reader import LocalCache, Sequences, items_of
from kdtrain.data.bytes import TokenBytes
from kdtrain.data.spelling import DEEP, Spelling
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.files import json_digest
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.objective.batch import Batch
from kdtrain.objective.cells import CellIndex
from kdtrain.objective.targets import DenseTargets, SparseTargets, Targets
from kdtrain.tokenizers.cells import Cells
from kdtrain.tokenizers.targets import AlignedCollator, AlignedTargets
from kdtrain.tokenizers.teacher_cells import TeacherCells, at_rows, coarsened, condensed
from kdtrain.tokenizers.view_format import ViewRecord

_NAMES = {"said": "prefix"}
"""A field of rows of version 2."""
MOST_DISAGREEMENT = 0.05
"""Share of the common boundaries at which teacher's and student's own tokens may lie in different cells."""
Ask = Callable[[Batch], Targets]
"""A teacher: its distributions at the positions of some of its own rows, on any device, of all entries."""
_ASKED = 4
"""The teacher's rows in one of its forwards."""
_AT_ONCE = {"cpu": 128, "cuda": 2048}
"""Positions whose whole distributions are held at once, in fp32, on their way to cells, by the kind of device."""


class View:
    """A finished view, and the cache that it is of. UsageError: it is damaged, or of another cache."""

    def __init__(self, folder: Path, cache: LocalCache) -> None:
        self.folder, self.cache = folder, cache
        self.record = ViewRecord.read(folder)
        if self.record.settings["cache"] != cache.manifest.digest:
            raise UsageError(
                f"{folder} is the view of another cache than {cache.name}; remove it, or name another --out"
            )
        self.seq_len = self.record.settings["seq_len"]
        count = self.record.cells["count"]
        stored = self.record.cells_file(folder).mapped().astype(np.int64)
        theirs, own, starts, spelled = np.split(stored, np.cumsum(self.record.parts)[:-1])
        fits = theirs.min() >= -1 and theirs.max() < count and own.min() >= 0 and own.max() <= count
        lengths = np.diff(starts)
        fits &= starts[0] == 0 and starts[-1] == len(spelled) and lengths.min() >= 0 and lengths.max() <= DEEP
        fits &= spelled.min() >= 0 and spelled.max() < len(own)
        if not fits or not np.bincount(own, minlength=count)[:count].all():
            raise UsageError(f"{folder / CELLS} holds impossible cells; remove the folder")
        self.cells = Cells(theirs, own, count)
        self.spelling = Spelling(starts, spelled, len(own))

    def lines(self) -> list[str]:
        """Describe the costs of reading the cache with another tokenizer, for people."""
        facts = self.facts()
        kept = "" if facts["entropy_kept"] is None else f"; the cells keep {facts['entropy_kept']:.1%} of the entropy"
        left_out = ""
        if facts["left_out"]:
            left_out = f"; {facts['left_out']:,} of {facts['documents']:,} documents are left out: their bytes change"
        return [
            f"tokenizers of {facts['teacher']:,} (teacher) and {facts['student']:,} entries: {facts['cells']:,} cells",
            f"{facts['boundaries']:.1%} of the student's labels of '{facts['split']}' begin where one of the teacher's "
            f"does, {facts['inside']:.1%} within one (compared by samples)"
            f"{left_out}",
            f"at {facts['disagreement']:.2%} of the common places both tokens lie in different cells (at most "
            f"{MOST_DISAGREEMENT:.0%}){kept}",
            f"events: {'; '.join(facts['events'])}",
        ]

    def facts(self) -> dict[str, Any]:
        """Return the facts of the alignment.

        These are the cache's digest, entries of both tokenizers, cells, events, the share of the entropy that is kept;
        of the first split the shares of labels at common boundaries and within tokens of the teacher, the share of
        boundaries that disagree, and the numbers of documents and of those left out.
        """
        record, (teacher, student) = self.record, self.record.sizes
        split, tally = next(iter(record.tallies.items()))
        labels = max(1, tally.labels)
        return {
            "cache": record.settings["cache"],
            "teacher": teacher,
            "student": student,
            "cells": self.cells.count,
            "split": split,
            "boundaries": tally.boundaries / labels,
            "inside": tally.inside / labels,
            "disagreement": tally.disagree / max(1, tally.boundaries),
            "entropy_kept": record.entropy_kept,
            "documents": tally.documents,
            "left_out": tally.left_out,
            "events": [printable(each) for each in record.events],
        }

    def __getitem__(self, split: str) -> "ViewReader":
        return ViewReader(self, split)


class ViewReader(Sequences):
    """One split of a view, a map-style data set: the student's rows with the teacher's numbers.

    An item has the tensors of `Batch.fields`, `vocabulary`, the student's entries twice, and `temperature_range`, 1 and
    1, as those of a cache. What all have in common, `collator` has: a `Student` that reads them needs it.

    UsageError: the view has not this split, or no row of it; cells disagree with the text too often.
    """

    def __init__(self, view: View, split: str) -> None:
        self.view, self.split = view, split
        self.reader = view.cache[split]
        if split not in view.record.shards:
            raise UsageError(f"{view.folder} has no split '{split}'; remove the folder, and the view is made anew")
        self._parts = [each.mapped() for each in view.record.row_files(view.folder, split)]
        self._firsts = np.cumsum([0, *map(len, self._parts)])
        if not len(self):
            raise UsageError(
                f"the text of '{split}' in {view.cache.name} is less than one row of {view.seq_len} tokens of the "
                "student's tokenizer; use a larger cache"
            )
        if (apart := view.facts()["disagreement"]) > MOST_DISAGREEMENT:
            raise UsageError(
                f"teacher's and student's own tokens lie in different cells at {apart:.1%} of the common boundaries, "
                f"and at most {MOST_DISAGREEMENT:.0%} are right; give the student another tokenizer"
            )
        self._cells = TeacherCells.of(view.cells, view.spelling)
        index = CellIndex.of(torch.from_numpy(view.cells.of_student.copy()), view.cells.count)
        self._index = None if view.cells.identity else index
        self._ask: Ask | None = None

    @functools.cached_property
    def _teacher_bytes(self) -> np.ndarray:
        """Bytes of each of the teacher's tokens; 0 behind them, and of special tokens."""
        tokenizer = load_tokenizer(self.view.cache.tokenizer)
        return np.append(TokenBytes.of(tokenizer).lengths, 0)

    @property
    def collator(self) -> AlignedCollator:
        """The collator that a student needs to read batches of the items, besides their tensors."""
        codec = self.reader.manifest.settings.codec
        known = codec.knots if self._index is None and codec.coded else (1.0,)
        return AlignedCollator((known, codec.num_samples), self._index)

    @property
    def _goes_inside(self) -> bool:
        """Whether cells are known of labels within a token of the teacher's (`teacher_cells`)."""
        codec = self.reader.manifest.settings.codec
        known_whole = self._ask is not None or not codec.coded or codec.num_samples > 0
        return known_whole and self._index is not None

    def asking(self, ask: Ask) -> "ViewReader":
        """Return a reader with a teacher's answers on its own rows, a few at a time, instead of a cache's numbers."""
        found = copy.copy(self)
        found._ask = ask
        return found

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._firsts[-1])

    def __repr__(self) -> str:
        return f"ViewReader of {self.view.cache.name}, '{self.split}': {len(self)} rows of {self.view.seq_len} tokens"

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        _, entries = self.view.record.sizes
        return items_of(self.read(indices), (entries, entries), (1.0, 1.0))

    def rows(self, indices: Iterable[int]) -> np.ndarray:
        """Return the rows as stored. IndexError: outside of the split. RunError: they hold impossible numbers."""
        wanted = np.asarray(list(indices), np.int64)
        if not len(wanted) or wanted.min() < 0 or wanted.max() >= len(self):
            raise IndexError(f"sequences {wanted.tolist()} are not among the {len(self)} of {self.split}")
        holders = np.searchsorted(self._firsts, wanted, side="right") - 1
        parts = zip(holders, wanted, strict=True)
        found = rename_fields(np.stack([self._parts[part][row - self._firsts[part]] for part, row in parts]), _NAMES)
        tokens, segments, prefix = (found[name] for name in ("tokens", "segments", "prefix"))
        fits = tokens.min() >= 0 and tokens.max() < self.view.record.sizes[1]
        fits &= segments.min() >= 0 and segments.max() < self.view.seq_len
        fits &= prefix.min() >= 0 and prefix.max() <= self.view.record.cells["spelled"]
        fits &= found["loss_mask"].view(np.uint8).max() <= 1
        if not fits:
            raise RunError(f"{self.view.folder} holds impossible rows of '{self.split}'; remove it, to make it anew")
        return found

    def read(self, indices: Iterable[int]) -> Batch:
        """Return the rows `indices`, in that order. RunError: a shard of the cache is damaged."""
        rows = self.rows(indices)
        length = self.reader.manifest.settings.seq_len
        source, prefix = (rows[name].astype(np.int64).ravel() for name in ("source", "prefix"))
        if not self._goes_inside:
            source = np.where(prefix > 0, -1, source)
        if source.max() >= len(self.reader) * length:
            raise RunError(f"{self.view.folder} names rows that the cache does not have; remove it")
        places = np.flatnonzero(source >= 0)
        positions = source[places]
        within = prefix[places] > 0
        numbers = np.unique(positions // length) if len(places) else np.zeros(1, np.int64)

        def place(positions: np.ndarray) -> np.ndarray:
            return np.searchsorted(numbers, positions // length) * length + positions % length

        at = np.full(len(source), -1)
        number = np.zeros(len(source), np.int64)
        at[places], number[places] = place(positions), prefix[places]
        own = torch.from_numpy(self.view.cells.of_student[rows["tokens"][:, 1:]].ravel())
        near, label_N, sizes_N = self._answers(numbers, torch.from_numpy(at), torch.from_numpy(number), own)
        # a label of the teacher's belongs to the token that it begins within, or to the last one before that is known
        begin = place(positions + within)
        row = places // self.view.seq_len
        end = np.where(np.append(row[1:], -1) == row, np.append(begin[1:], 0), begin + ~within)
        found = np.zeros((2, len(source)))
        for into, each in zip(found, (label_N, sizes_N), strict=True):
            sums = np.append(0.0, np.cumsum(each))
            into[places] = sums[end] - sums[begin]
        return Batch(
            tokens=torch.from_numpy(rows["tokens"].astype(np.int64)),
            loss_mask=torch.from_numpy(rows["loss_mask"].copy()),
            segments=torch.from_numpy(rows["segments"].astype(np.int64)),
            targets=AlignedTargets(
                near=replace(near, label_logprob=torch.from_numpy(found[0]).float()),
                compared=torch.from_numpy(at >= 0),
                teacher_bytes=torch.from_numpy(found[1]).float(),
                cells=self._index,
            ),
        )

    def _answers(
        self, numbers: np.ndarray, at: Tensor, prefix: Tensor, own: Tensor
    ) -> tuple[SparseTargets, np.ndarray, np.ndarray]:
        """Return targets over cells, log p of all labels and the labels' bytes, of the teacher's rows `numbers`.

        The targets are at the positions `at` of the rows (below 0: none) behind the tokens `prefix`, where the text
        has the cells `own`; bytes are 0 where masked.
        """
        ask = self._ask
        groups = [numbers] if ask is None else np.split(numbers, range(_ASKED, len(numbers), _ASKED))
        batches = [self.reader.read(each.tolist()) for each in groups]
        whole: Iterator[Targets | None] = (each.targets if ask is None else ask(each) for each in batches)
        parts = list[SparseTargets]()
        labels = list[Tensor]()
        order = at.argsort(stable=True)
        near = None
        wanted = at[order]
        first = 0
        for targets in whole:
            if targets is None:
                raise UsageError(f"{self.view.cache.name} holds no teacher's numbers")
            if isinstance(targets, SparseTargets):
                labels.append(targets.label_logprob)
                text = own if self._goes_inside else None
                near = coarsened(targets, self._cells, at, prefix, text) if self._index else at_rows(targets, at)
                continue
            size = _AT_ONCE.get(targets[:1].resolved().label_logprob.device.type, 128)
            for start in range(0, len(targets), size):
                dense = targets[start : start + size].resolved()
                assert isinstance(dense, DenseTargets)
                labels.append(dense.label_logprob)
                self._cells = self._cells.to(dense.logprobs.device)
                begin, end = torch.searchsorted(wanted, torch.tensor([first, first + len(dense)])).tolist()
                # one at least, so that there is something to leave out
                for rows in (order[begin:end] if end > begin or parts else order[:1]).split(size):
                    place = (at[rows] - first).clamp(0, len(dense) - 1)
                    parts.append(condensed(dense, self._cells, place, prefix[rows]))
                first += len(dense)
        if near is None:
            joined = parts[0].map(lambda name, _: torch.cat([getattr(each, name) for each in parts]).cpu())
            row = torch.empty_like(at)
            row[order] = torch.arange(len(at)) - (len(at) - len(joined))
            near = at_rows(joined, row.masked_fill(at < 0, -1))
        label_N = torch.cat(labels).double().cpu().numpy()
        tokens_N = torch.cat([each.tokens[:, 1:].flatten() for each in batches]).numpy()
        counts_N = torch.cat([each.loss_mask.flatten() for each in batches]).numpy() & ~np.isnan(label_N)
        sizes_N = self._teacher_bytes[np.minimum(tokens_N, len(self._teacher_bytes) - 1)]
        return near, np.where(counts_N, label_N, 0.0), np.where(counts_N, sizes_N, 0)


def identity_of(view: View) -> str:
    """Return a digest of a view and its cache, without measured numbers, whose last bits depend on the machine."""
    record = view.record
    return json_digest({"settings": record.settings, "shards": record.shards, "cells": record.cells["sha256"]})
