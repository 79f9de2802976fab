"""Views that a stranger or an accident changed: each is refused in one line, or made anew."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from kdtrain.errors import RunError, UsageError
from kdtrain.files import file_digest, publish_json, read_sealed
from kdtrain.tokenizers import view_builder as views
from kdtrain.tokenizers.view import View
from kdtrain.tokenizers.view_builder import build_view
from kdtrain.tokenizers.view_format import row_type, verify_view
from tests.fetched import files_of
from tests.token_kinds import train
from tests.tokenizers.view_kit import CODECS, ROWS, foreign_cache


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(views, "_ROWS", ROWS)


def header(text):
    """Make a file of numpy that begins with this header."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


SHARD, CELLS = "train-00000.npy", "cells.npy"


def of_cells(part, change):
    """Change an array of cells.npy: the cells of the teacher's and the student's tokens, then those of `Spelling`."""

    def changed(folder, record):
        every = np.load(folder / CELLS)
        teacher, student = (record["cells"][name] for name in ("teacher", "student"))
        change(np.split(every, np.cumsum([teacher, student, teacher + 1]))[part])
        np.save(folder / CELLS, every)

    return changed


def of_rows(change):
    def changed(folder, record):
        rows = np.load(folder / SHARD)
        change(rows)
        np.save(folder / SHARD, rows)

    return changed


def written(content, name=SHARD):
    return lambda folder, record: (folder / name).write_bytes(content)


HOSTILE = {
    "no shards": lambda folder, record: record.update(shards={}, tallies={}),
    "a shard without digest": lambda folder, record: record["shards"].update(train=[{}]),
    "no training text": lambda folder, record: [record[name].pop("train") for name in ("shards", "tallies")],
    "no tallies": lambda folder, record: record.update(tallies={}),
    "a tally without labels": lambda folder, record: record["tallies"]["train"].pop("labels"),
    "a trillion cells": lambda folder, record: record["cells"].update(count=10**12),
    "a huge row": lambda folder, record: record["settings"].update(seq_len=2**40),
    "an event alone": lambda folder, record: record["settings"].update(events=[[1]]),
    "a cell below 0": of_cells(1, lambda own: own.__setitem__(0, -1)),
    "an empty cell": of_cells(1, lambda own: own.__setitem__(own == 3, 2)),
    "tokens that begin behind their ends": of_cells(2, lambda starts: starts.__setitem__(5, 2**30)),
    "a token that nobody spells with": of_cells(3, lambda tokens: tokens.__setitem__(3, 2**20)),
    "a token of all that is spelled": of_cells(2, lambda starts: starts.__setitem__(slice(1, None), starts[-1])),
    "less spelled": lambda folder, record: record["cells"].update(spelled=record["cells"]["spelled"] - 1),
    "nothing spelled": lambda folder, record: record["cells"].update(spelled=0),
    "two billion spelled": lambda folder, record: record["cells"].update(spelled=2**31 - 1),
    "a zip": written(b"PK\x05\x06" + b"\0" * 18),
    "a cut header": written(header("{'descr': '<i4', 'shape': (")),
    "a shape of 10^22": written(header(f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({10**22},)}}\n")),
    "cells of a zip": written(b"PK\x05\x06" + b"\0" * 18, CELLS),
    "a token below 0": of_rows(lambda rows: rows["tokens"].__setitem__((0, 1), -1)),
    "a token of nobody": of_rows(lambda rows: rows["tokens"].__setitem__((0, 1), 2**20)),
    "a segment of nobody": of_rows(lambda rows: rows["segments"].__setitem__((0, 1), -(2**30))),
    "a mask of 7": of_rows(lambda rows: rows["loss_mask"].view(np.uint8).__setitem__((0, 1), 7)),
    "a prefix of nobody": of_rows(lambda rows: rows["prefix"].__setitem__((0, 1), 2**30)),
    "a prefix below 0": of_rows(lambda rows: rows["prefix"].__setitem__((0, 1), -1)),
    "a source of nobody": of_rows(lambda rows: rows["source"].__setitem__((0, 1), 2**62)),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Build a view that nobody changed."""
    folder = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(views, "_ROWS", ROWS)
        return build_view(folder / "data", foreign_cache(folder / "cache", *CODECS["samples"]), train("gpt2"))


@pytest.fixture
def folder(sound, tmp_path):
    """Copy the sound view."""
    return Path(shutil.copytree(sound.folder, tmp_path / "data"))


@pytest.mark.parametrize("change", HOSTILE.values(), ids=[name.replace(" ", "-") for name in HOSTILE])
def test_a_strangers_view_is_refused_in_one_line(sound, folder, change):
    record = read_sealed(folder / "view.json")
    change(folder, record)
    record["cells"]["sha256"] = file_digest(folder / CELLS)
    if record["shards"].get("train", [{}])[0]:
        record["shards"]["train"][0]["sha256"] = file_digest(folder / SHARD)
    publish_json(folder / "view.json", record, "x")
    with pytest.raises((UsageError, RunError)) as refused:
        View(folder, sound.cache)["train"].read([0])
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)


def test_a_view_of_another_version_is_known_as_such_also_where_it_is_finished(sound, folder):
    for name in ("view.json", "settings.json"):
        record = read_sealed(folder / name)
        (record["settings"] if name == "view.json" else record)["version"] = 1
        record.pop("cells", None)
        publish_json(folder / name, {key: each for key, each in record.items() if key != "digest"}, "x")
    with pytest.raises(views.OtherViewError, match="holds the view of another version of kdtrain; name another folder"):
        build_view(folder, sound.cache, train("gpt2"))


def test_a_finished_view_of_version_2_is_read_as_it_is(sound, folder):
    record = read_sealed(folder / "view.json")
    record["settings"]["version"] = 2
    for split, shards in record["shards"].items():
        record["tallies"][split]["in_chunks"] = 7
        for number, shard in enumerate(shards):
            rows = np.load(path := folder / f"{split}-{number:05d}.npy")
            older = np.ones(rows.shape, row_type(sound.seq_len, 2))
            for old, name in zip(older.dtype.names, rows.dtype.names, strict=False):
                older[old] = rows[name]
            np.save(path, older)
            shard["sha256"] = file_digest(path)
    publish_json(folder / "view.json", record, "x")
    found = build_view(folder, sound.cache, train("gpt2"))
    assert found.record.settings["version"] == 2 and verify_view(folder) == []
    one, other = (each["train"].rows(range(4)) for each in (found, sound))
    assert all(np.array_equal(one[name], other[name]) for name in other.dtype.names)


def test_an_array_larger_than_stated_is_not_read_to_its_end(sound, folder):
    """Strangers' sparse files take no disk, and hours to read."""
    for name in (SHARD, CELLS):
        with open(folder / name, "r+b") as file:
            file.truncate(2**40)
    assert ["(it has 1099511627776 bytes" in each for each in verify_view(folder)] == [True] * 2
    with pytest.raises(RunError, match=r"cells.npy cannot be read .it has 1099511627776 bytes"):
        View(folder, sound.cache)
    (folder / "view.json").unlink()
    os.truncate(folder / CELLS, 0)
    build_view(folder, sound.cache, train("gpt2"))
    assert files_of(folder) == files_of(sound.folder)


def test_verify_names_a_folder_and_a_pipe_in_the_place_of_shards(sound, folder):
    assert verify_view(folder) == []
    for name in (SHARD, "train-00001.npy", CELLS):
        (folder / name).unlink()
    (folder / SHARD).mkdir()
    os.mkfifo(folder / "train-00001.npy")
    problems = [each.split("(")[1].partition("):")[0] for each in verify_view(folder)]
    assert problems == [f"[Errno 2] No such file or directory: '{folder / CELLS}'", *["it is not a regular file"] * 2]
