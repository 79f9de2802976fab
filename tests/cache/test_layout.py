"""The files on disk are as cache/README.md specifies, and other tools can read them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import read_manifest
from kdtrain.cache.format.spec import ABSENT, CodecSpec, datasets
from kdtrain.cache.read.reader import CacheReader
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.cache.write.writer import write_cache
from kdtrain.objective.targets import SparseTargets


def test_a_cache_is_laid_out_as_documented(whole: Path) -> None:
    names = {path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()}
    shards = ["train-00000", "train-00001", "train-00002", "validation-00000"]
    expected = {f"shards/{name}.{suffix}" for name in shards for suffix in ("h5", "json")}
    plain = ("manifest.json", "settings.json", "index.h5", "README.md")
    assert names == expected | {*plain, "tokenizer/tokenizer.json"}
    assert verify_cache(whole) == []
    splits = read_manifest(whole).splits
    assert [shard["sequences"] for shard in splits["train"]["shards"]] == [4, 4, 2]
    assert splits["validation"]["sequences"] == 3


def test_the_index_is_read_without_kdtrain(whole: Path, tmp_path: Path, workshop) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(whole, moved)
    code = (
        "import sys, h5py, hdf5plugin, json, numpy as np\n"
        "file = h5py.File(sys.argv[1])\n"
        "total = lambda values: np.nan_to_num(values.astype(float)).sum()\n"
        "sums = {f'{s}/{n}': total(d[:]) for s in file for n, d in file[s].items() if n != 'dictionary'}\n"
        "assert 'kdtrain' not in sys.modules\n"
        "top_k, shape = int(file['train'].attrs['top_k']), file['train/ids'].shape\n"
        "groups = {f'{s}/{n}': group for s in file for n, group in file[s]['dictionary'].items()}\n"
        "lists = {f'{n}/{d}': total(v[:]) for n, group in groups.items() for d, v in group.items()}\n"
        "print(json.dumps({'sums': sums, 'lists': lists, 'shape': shape, 'top_k': top_k}))"
    )
    command = [sys.executable, "-c", code, str(moved / "index.h5")]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout)
    assert found["shape"] == [10, 12, 16]
    assert found["top_k"] == 4
    names = {f"train/train-0000{number}" for number in range(3)} | {"validation/validation-00000"}
    assert {name.rsplit("/", 1)[0] for name in found["lists"]} == names
    assert len(found["lists"]) == 4 * len(names)
    content = workshop.content(moved)
    for split in ("train", "validation"):
        for name in datasets(CodecSpec(kind="sparse", vocab_size=64, top_k=4, num_samples=8), 16):
            parts = [v for key, v in content.items() if key.startswith(split) and key.endswith(f"/{name}")]
            total = sum(np.nan_to_num(part.astype(float)).sum() for part in parts)
            assert found["sums"][f"{split}/{name}"] == pytest.approx(total, rel=1e-9), name


def test_an_index_whose_shard_is_gone_reads_as_fill_values(tmp_path: Path, workshop, codecs) -> None:
    folder = workshop.build(tmp_path / "c", codecs["top_k"])
    cache_format.shard_path(folder, "train-00000").unlink()
    with h5py.File(folder / "index.h5") as file:
        assert (file["train/ids"][0] == 65_535).all()
        assert (file["train/numbers"][0] == 65_535).all()
        assert file["train/dictionary"].get("train-00000") is None
        assert (file["train/tokens"][0] == 65_535).all()
        assert (file["train/numbers"][4, -1] < 65_535).all()


def test_a_vocabulary_of_151936_is_cached_with_wide_ids(tmp_path: Path, workshop) -> None:
    spec = CodecSpec(kind="sparse", vocab_size=151_936, top_k=4, num_samples=4)
    splits = {"train": workshop.rows(2, vocab_size=151_936), "validation": workshop.rows(1, vocab_size=151_936)}
    manifest = write_cache(tmp_path / "c", workshop.settings(spec), splits, teacher=workshop.teacher(151_936))
    with h5py.File(tmp_path / "c" / "index.h5") as file:
        assert file["train/tokens"].dtype == np.uint32
        assert file["train/tokens"][:].max() > 65_535
    assert manifest.temperature_range
    assert manifest.fidelity
    assert manifest.fidelity["T=1"]["kl_bucket"] < 1e-3


def test_every_data_set_is_checksummed_and_compressed(whole: Path) -> None:
    with h5py.File(cache_format.shard_path(whole, "train-00000")) as file:
        for name, dataset in file["dictionary"].items():
            assert dataset.fletcher32, name
        for name, dataset in file.items():
            if name == "dictionary":
                continue
            assert dataset.fletcher32, name
            assert {"32008", "32015"} & dataset._filters.keys(), name
            number = len(dataset) if name in ("loss_mask", "segments") else 1
            assert dataset.chunks == (number, *dataset.shape[1:]), name


@pytest.mark.parametrize("name", ["both", "num_samples"])
def test_the_recipe_of_the_format_page_reads_what_the_reader_reads(tmp_path: Path, workshop, codecs, name) -> None:
    whole = workshop.build(tmp_path / "c", codecs[name])
    page = (Path(__file__).parents[2] / "cache" / "README.md").read_text()
    recipe = page.split("```python\n")[1].split("```")[0].replace("cache/NAME", str(whole))
    found: dict[str, Any] = {}
    for row in (0, 5, 9):
        exec(recipe.replace("row = 0", f"row = {row}"), found)
        targets = CacheReader(whole, "train").read([row]).targets
        assert isinstance(targets, SparseTargets)
        absent = targets.ids.numpy() == ABSENT
        assert np.array_equal(found["absent"].T, absent)
        assert np.array_equal(found["ids"].T[~absent], targets.ids.numpy()[~absent])
        assert np.array_equal(found["label"], CacheReader(whole, "train").read([row]).tokens[0, 1:].numpy())
        if name == "num_samples":
            assert np.array_equal(found["counts"].T, targets.counts.numpy())
        else:
            assert np.allclose(found["logprobs"].T[~absent], targets.logprobs.numpy()[~absent], rtol=1e-5, atol=1e-6)
