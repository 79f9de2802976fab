"""Damage is found and named, and a student or tokenizer that does not fit is refused."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import CacheSettings, Manifest, read_manifest, refuse_tokenizer
from kdtrain.cache.read.reader import CacheReader
from kdtrain.cache.tools.verify import repair, verify_cache
from kdtrain.cache.write.writer import write_cache
from kdtrain.errors import UsageError
from kdtrain.files import publish_json, read_sealed
from kdtrain.models.output_head import refuse_vocabulary
from kdtrain.models.tokenizer import tokenizer_digest


@pytest.fixture(scope="module")
def sound(tmp_path_factory, workshop, codecs) -> Path:
    folder = tmp_path_factory.mktemp("provenance")
    _tokenizer().save_pretrained(folder / "tokenizer")
    settings, splits = workshop.settings(codecs["top_k"]), workshop.splits()
    options = {"teacher": workshop.teacher(), "tokenizer": folder / "tokenizer", "batch_size": 3}
    write_cache(folder / "cache", settings, splits, **options)
    return folder / "cache"


@pytest.fixture
def cache(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "cache"))


def _tokenizer(extra: str = "") -> PreTrainedTokenizerFast:
    vocabulary = {character: number for number, character in enumerate("abcdefgh" + extra)}
    backend = Tokenizer(models.BPE(vocab={**vocabulary, "ab": len(vocabulary)}, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def _flip(path: Path, place: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def _mended(cache: Path, workshop, codecs, sound: Path) -> None:
    """Assert that `repair`, then the same build, gives a sound cache again."""
    assert repair(cache)
    with pytest.raises(UsageError, match="unfinished"):
        read_manifest(cache)
    options = {"teacher": workshop.teacher(), "tokenizer": sound.parent / "tokenizer", "batch_size": 3}
    write_cache(cache, workshop.settings(codecs["top_k"]), workshop.splits(), **options)
    assert verify_cache(cache) == []


def test_a_sound_cache_has_no_problems_and_repair_leaves_it_alone(sound: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sound.rglob("*")}
    assert verify_cache(sound) == []
    assert repair(sound) == []
    assert before == {path: path.stat().st_mtime_ns for path in sound.rglob("*")}


@pytest.mark.parametrize("place", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    "name",
    [
        *("shards/train-00001.h5", "shards/train-00001.json", "manifest.json", "settings.json", "index.h5"),
        "tokenizer/tokenizer.json",
    ],
)
def test_one_flipped_bit_is_found_named_and_repaired(
    cache: Path, workshop, codecs, sound: Path, name: str, place: float
) -> None:
    data = bytearray((cache / name).read_bytes())
    _flip(cache / name, place)
    if name.endswith(".json") and place in (0.0, 1.0):
        data[-3] ^= 1  # the outermost bytes are a brace and a line end
        (cache / name).write_bytes(data)
    problems = verify_cache(cache)
    assert len(problems) == 1
    assert str(cache / name) in problems[0]
    _mended(cache, workshop, codecs, sound)


def test_a_truncated_a_missing_and_swapped_shards_are_named(cache: Path, workshop, codecs, sound: Path) -> None:
    path = cache_format.shard_path(cache, "train-00000")
    path.write_bytes(path.read_bytes()[:-1])
    problem = next(iter(verify_cache(cache)))
    assert "train-00000.h5: has" in problem
    path.unlink()
    assert verify_cache(cache) == [f"{path}: is missing"]
    _mended(cache, workshop, codecs, sound)
    other = cache_format.shard_path(cache, "train-00001")
    path.rename(cache / "x")
    other.rename(path)
    (cache / "x").rename(other)
    assert {line.split(":")[0] for line in verify_cache(cache)} == {str(path), str(other)}
    _mended(cache, workshop, codecs, sound)


def test_repair_moves_only_damaged_files_and_returns_those_that_it_moved(cache: Path) -> None:
    _flip(cache / cache_format.MANIFEST, 0.3)
    assert repair(cache) == [f"{cache / name}.damaged-1" for name in (cache_format.MANIFEST, cache_format.INDEX)]
    assert repair(cache) == []  # unfinished, which verify reports, and not damaged
    _flip(cache_format.shard_path(cache, "train-00001"))
    assert repair(cache) == [str(cache / "shards" / "train-00001.h5.damaged-1")]
    left = sorted(path.stem for path in (cache / "shards").glob("*.h5"))
    assert left == ["train-00000", "train-00002", "validation-00000"]


def test_a_shard_of_another_size_is_reported_before_anything_is_read_by_all_who_open_the_cache(
    cache: Path, workshop, codecs
) -> None:
    damaged = cache_format.shard_path(cache, "train-00001")
    os.truncate(damaged, 5000)
    wrong = (
        rf"^{damaged}: has 5000 bytes instead of \d+: run kdtrain verify {cache} --repair, then the same cache-teacher"
    )
    for split in ("train", "validation"):
        with pytest.raises(UsageError, match=wrong):
            CacheReader(cache, split)
    settings, teacher = workshop.settings(codecs["top_k"]), workshop.teacher()
    with pytest.raises(UsageError, match=wrong):
        write_cache(cache, settings, workshop.splits(), teacher=teacher)
    damaged.unlink()
    cache_format.shard_path(cache, "train-00000").unlink()
    with pytest.raises(UsageError, match=r"train-00000.h5: is missing \(and 1 more shards\): run kdtrain verify"):
        CacheReader(cache, "train")
    repair(cache)
    write_cache(cache, settings, workshop.splits(), teacher=teacher, batch_size=3)
    assert len(CacheReader(cache, "train")) == 10


def test_an_edited_manifest_is_refused(cache: Path) -> None:
    path = cache / cache_format.MANIFEST
    record = json.loads(path.read_text())
    record["codec"]["top_k"] = 5
    path.write_text(json.dumps(record))
    with pytest.raises(UsageError, match=r"altered or damaged .*--repair"):
        CacheReader(cache, "train")


def test_an_unfinished_or_missing_cache_is_refused(cache: Path, tmp_path: Path) -> None:
    (cache / cache_format.MANIFEST).unlink()
    with pytest.raises(UsageError, match="unfinished; run the same cache-teacher command"):
        CacheReader(cache, "train")
    assert len(verify_cache(cache)) == 1
    for read in (read_manifest, verify_cache):
        with pytest.raises(UsageError, match="no cache is there"):
            read(tmp_path / "nowhere")


@pytest.mark.parametrize("version", [1, 2, 6, None, "two"])
def test_another_format_version_is_refused_by_number_in_one_line(cache: Path, version: object) -> None:
    path = cache / cache_format.MANIFEST
    publish_json(path, {**read_sealed(path), "format_version": version}, "cache.manifest")
    with pytest.raises(UsageError, match=rf"^[^\n]*format version {version}; this kdtrain reads 3 to 5[^\n]*$"):
        read_manifest(cache)


def test_a_manifest_and_settings_go_through_json(sound: Path) -> None:
    manifest = read_manifest(sound)
    assert manifest.to_json() == read_sealed(sound / cache_format.MANIFEST)
    assert CacheSettings.from_json(manifest.settings.to_json()) == manifest.settings
    assert manifest.bytes_per_token["total"] == pytest.approx(
        sum(path.stat().st_size for path in (sound / "shards").glob("*.h5")) / (13 * 16)
    )
    assert set(manifest.versions) >= {"kdtrain", "torch", "h5py", "hdf5plugin"}


def test_a_manifest_without_the_bytes_of_a_token_is_refused_with_the_key(sound: Path) -> None:
    record = read_sealed(sound / cache_format.MANIFEST) | {"bytes_per_token": {}}
    with pytest.raises(ValueError, match=r"bytes_per_token: total is missing"):
        Manifest.from_json(record)


@pytest.mark.parametrize(
    "name", ["a\0b", "a\ud800b", "x" * 256, "ä" * 128, "a/" * 3000 + "b", "", ".", "a/../../b", "/etc/a", "a\nb"]
)
def test_a_tokenizer_file_whose_name_no_folder_can_hold_is_refused(sound: Path, name: str) -> None:
    record = read_sealed(sound / cache_format.MANIFEST)
    with pytest.raises(ValueError, match=r"^tokenizer_files: '.{0,80}' is not a name inside the folder$"):
        Manifest.from_json({**record, "tokenizer_files": {name: "0" * 64}})
    for fine in ("x" * 255, "additional_chat_templates/ä b.jinja"):
        Manifest.from_json({**record, "tokenizer_files": {fine: "0" * 64}})


@pytest.mark.parametrize(
    "cached, used, student, fits",
    [
        (2048, 2048, 2048, True),
        (2048, 2048, 4096, True),
        (2048, 2048, 2047, False),
        (152_064, 151_665, 151_936, True),
        (151_936, 151_665, 152_064, True),
        (152_064, 151_665, 151_664, False),
        (3000, 1000, 1975, False),
        (3000, 1000, 1976, True),
        (262_144, 200_000, 259_523, True),
        (262_144, 200_000, 259_522, False),
    ],
)
def test_a_padded_vocabulary_fits_and_a_smaller_one_is_refused(
    cached: int, used: int, student: int, fits: bool
) -> None:
    refused = pytest.raises(UsageError, match=f"vocabulary of {student}, the cache one of {cached}")
    with contextlib.nullcontext() if fits else refused:
        refuse_vocabulary(student, cached, used)


def test_another_tokenizer_is_refused() -> None:
    cached = tokenizer_digest(_tokenizer())
    refuse_tokenizer(tokenizer_digest(_tokenizer()), cached)
    refuse_tokenizer(None, cached)
    with pytest.raises(UsageError, match="another tokenizer"):
        refuse_tokenizer(tokenizer_digest(_tokenizer("z")), cached)


def test_a_tokenizer_has_one_digest_in_a_folder_loaded_and_used(tmp_path: Path) -> None:
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(tmp_path / "t")
    digest = tokenizer_digest(tmp_path / "t")
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path / "t")
    loaded(["ab", "abc"], truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == tokenizer_digest(loaded) == digest
    content = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    content["model"]["merges"] = ["a b"]
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizer_digest(tmp_path / "t") == digest
    content["model"]["merges"] = ["b c"]
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizer_digest(tmp_path / "t") != digest
    with pytest.raises(UsageError, match=r"tokenizer.json is missing"):
        tokenizer_digest(tmp_path)


@pytest.mark.parametrize("old, new", [("0.3", "0.4"), ("0.30000000000000004", "0.30000000000000005")])
def test_a_sealed_record_cannot_be_changed_nor_spelled_in_another_way(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "a.json"
    publish_json(path, {"x": 0.1 + 0.2}, "cache.settings")
    assert read_sealed(path)["x"] == 0.1 + 0.2
    path.write_text(path.read_text().replace(old, new))
    assert (json.loads(path.read_text())["x"] == 0.1 + 0.2) == (len(new) > 3)
    with pytest.raises(ValueError, match="digest"):
        read_sealed(path)
