"""Caches of the same rows add up, others are appended, and each is cut, bit by bit and whatever happens in between."""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import Manifest, check_sizes, read_manifest
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.tools.facts import CARD
from kdtrain.cache.tools.verify import repair, verify_cache
from kdtrain.cache.write.generated_text import finish_reasons
from kdtrain.cache.write.writer import write_cache
from kdtrain.errors import RunError, UsageError
from kdtrain.files import publish_json, read_sealed
from kdtrain.library import Cache
from kdtrain.plugins.caches.merge import joined, merge, parent_record, subset
from tests.cache.fork_kit import exit_of

NUMBER = 12
TEACHERS = {"one": 1, "two": 2}


def teacher(seed: int) -> Callable[..., torch.Tensor]:
    table = 2 * torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
    return lambda tokens_BT, segments_BT: table[tokens_BT]


class Shelf:
    """Caches of samples, each made once."""

    def __init__(self, folder: Path, workshop) -> None:
        self.folder, self.workshop = folder, workshop

    def __call__(
        self, number: int = NUMBER, sampling: str = "grid", who: str = "one", *, rows: int = 0, codec: str = "", **more
    ) -> Cache:
        name = f"{number}-{sampling.replace('/', '_')}-{who}-{rows}-{codec}-{'-'.join(map(str, more.values()))}"
        if not (self.folder / name).exists():
            spec = CodecSpec(kind="sparse", vocab_size=64, num_samples=number)
            if codec:
                spec = (
                    CodecSpec(kind=codec, vocab_size=64)
                    if codec != "top_k"
                    else dataclasses.replace(spec, top_k=4, knots=())
                )
            named = {"spec": who, "weights_digest": f"{TEACHERS[who]:064d}", "dtype": "float32"}
            settings = self.workshop.settings(spec, sampling=sampling, teacher=named, **more)
            splits = {"train": self.workshop.rows(10, seed=rows), "validation": self.workshop.rows(3, seed=1)}
            asked = None if codec == "tokens" else teacher(TEACHERS[who])
            write_cache(self.folder / name, settings, splits, teacher=asked, batch_size=3)
        return Cache(self.folder / name)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, workshop) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"), workshop)


def files(cache: Path) -> dict[str, bytes]:
    """Return what two captures of the same have in common: all files but manifest and card."""
    named = (cache_format.MANIFEST, CARD)
    paths = [path for path in cache.rglob("*") if path.is_file() and path.name not in named]
    return {str(path.relative_to(cache)): path.read_bytes() for path in paths if not path.name.startswith(".")}


def content(where: Path | Cache, split: str = "train") -> list[dict[str, torch.Tensor]]:
    reader = (where if isinstance(where, Cache) else Cache(where))[split]
    return [reader[row] for row in range(len(reader))]


def assert_rows(ours: list, theirs: list) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_sums_of_sums_and_many_parts_at_once_are_the_capture_of_all(shelf, tmp_path) -> None:
    whole, quarter = shelf(48), shelf(2 * NUMBER, "grid+1/48")
    merge([shelf(), shelf(sampling="grid+1/24")], tmp_path / "half")
    sums = merge([Cache(tmp_path / "half"), quarter], tmp_path / "twice")
    merge([quarter, shelf(sampling="grid+1/24"), shelf()], tmp_path / "once")
    assert files(tmp_path / "twice") == files(tmp_path / "once") == files(whole.folder)
    nested = [parent for parent in sums.parents or [] if "parents" in parent]
    assert len(nested) == 1 and len(nested[0]["parents"]) == 2 and verify_cache(tmp_path / "once") == []
    assert sorted(parent["weight"] for parent in sums.parents or []) == [0.5, 0.5]


KILLS = [
    "cache.settings.before-rename",
    "cache.shard.before-rename",
    "cache.shard.after-publish",
    "cache.before-finish",
]
KILLS += ["cache.sidecar.before-rename", "cache.index.after-publish", "cache.manifest.before-rename"]
KILLED = [("sum", point) for point in KILLS] + [(name, point) for name in ("append", "cut") for point in KILLS[1:3]]


def works(shelf: Shelf) -> dict[str, Callable[[Path], Manifest]]:
    parts = [shelf(), shelf(sampling="grid+1/24")]
    return {
        "sum": lambda out: merge(parts, out),
        "append": lambda out: merge([shelf(rows=5), shelf()], out),
        "cut": lambda out: subset(shelf(), out, rows=(2, 9)),
    }


@pytest.mark.parametrize("name, point", KILLED)
def test_a_killed_merge_or_cut_resumes_to_what_an_uninterrupted_one_makes(
    shelf, tmp_path, name: str, point: str
) -> None:
    work = works(shelf)[name]
    expected = work(tmp_path / "expected").digest
    out, log = tmp_path / "out", tmp_path / "log"
    assert exit_of(lambda: work(out), f"{point}:kill", log) == -9
    assert log.read_text().strip() == point
    if (out / "shards").is_dir() and any((out / "shards").glob("*.json")):
        with pytest.raises(UsageError, match="unfinished"):
            read_manifest(out)
    assert work(out).digest == expected
    assert files(out) == files(tmp_path / "expected") and verify_cache(out) == []
    assert not list(out.rglob("*.tmp")) and not list(out.rglob(".building-*"))


@pytest.mark.parametrize("name", ["sum", "append", "cut"])
def test_a_full_disk_is_one_error_and_keeps_what_is_published(shelf, tmp_path, name: str) -> None:
    work, out = works(shelf)[name], tmp_path / "out"
    assert exit_of(lambda: work(out), "cache.shard.before-fsync:enospc:2") == 1
    assert len(list((out / "shards").glob("*.h5"))) == 1 and not list(out.rglob("*.tmp"))
    assert work(out).digest == work(tmp_path / "expected").digest


def test_a_damaged_merge_is_repaired_by_the_same_merge(shelf, tmp_path) -> None:
    for name, work in works(shelf).items():
        out = tmp_path / name
        digest = work(out).digest
        shard = out / "shards" / "train-00001.h5"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.unlink()  # it may be a link to the parent's file
        shard.write_bytes(content)
        assert len(verify_cache(out)) == 1 and repair(out)
        assert work(out).digest == digest and verify_cache(out) == []


def test_the_ancestry_of_100_000_parents_is_not_taken_over_and_that_of_some_is(shelf, tmp_path) -> None:
    works(shelf)["append"](tmp_path / "out")
    cache = Cache(tmp_path / "out")
    assert cache.manifest.parents and parent_record(cache)["parents"] == cache.manifest.parents
    cache.manifest = dataclasses.replace(cache.manifest, parents=cache.manifest.parents * 50_000)
    assert "parents" not in parent_record(cache)


@pytest.mark.parametrize("name, command", [("sum", "merge"), ("append", "merge"), ("cut", "subset")])
def test_a_damaged_merge_or_cut_names_the_command_that_builds_it_again(
    shelf, tmp_path, name: str, command: str
) -> None:
    works(shelf)[name](tmp_path / "out")
    cache, shard = Cache(tmp_path / "out"), tmp_path / "out" / "shards" / "train-00000.h5"
    size = shard.stat().st_size
    shard.unlink()  # it may be a link to the parent's file
    shard.write_bytes(bytes(size))
    hint = f"--repair, then the same {command} command again$"
    with pytest.raises(RunError, match=hint):
        cache["train"].read([0])
    shard.write_bytes(b"x")
    with pytest.raises(UsageError, match=hint):
        check_sizes(tmp_path / "out", cache.manifest)
    imported = dataclasses.replace(cache.manifest, parents=None, origin={})
    with pytest.raises(UsageError, match=r"then the same import command again$"):
        check_sizes(tmp_path / "out", imported)


def test_other_rows_are_appended_as_they_are_and_a_common_validation_split_is_kept_once(shelf, tmp_path) -> None:
    one, two = shelf(), shelf(rows=5)
    manifest = merge([one, two], tmp_path / "both")
    assert manifest.digest == merge([two, one], tmp_path / "again").digest and verify_cache(tmp_path / "both") == []
    assert manifest.settings.format_version == 4
    first, second = sorted((one, two), key=lambda cache: cache.manifest.digest)
    assert_rows(content(tmp_path / "both"), content(first) + content(second))
    assert manifest.splits["validation"]["sequences"] == 3
    assert manifest.splits["train"]["sequences"] == 20
    theirs = [shard["sha256"] for cache in (first, second) for shard in cache.manifest.splits["train"]["shards"]]
    assert [shard["sha256"] for shard in manifest.splits["train"]["shards"]] == theirs
    third = merge([Cache(tmp_path / "both"), shelf(rows=6, who="two")], tmp_path / "three")
    assert third.splits["train"]["sequences"] == 30 and third.splits["validation"]["sequences"] == 6
    assert verify_cache(tmp_path / "three") == []
    reader = Cache(tmp_path / "three")["train"]
    rows = np.random.RandomState(0).permutation(30)
    assert torch.equal(
        reader.read(rows.tolist()).tokens, torch.stack([row["tokens"] for row in content(tmp_path / "three")])[rows]
    )


@pytest.mark.parametrize("codec", ["", "dense", "tokens", "top_k"])
def test_a_cut_cache_holds_the_same_numbers_and_can_be_put_together_again(shelf, tmp_path, codec: str) -> None:
    cache = shelf(codec=codec)
    for name, rows in (("a", (0, 3)), ("b", (3, None))):
        manifest = subset(cache, tmp_path / name, rows=rows)
        assert verify_cache(tmp_path / name) == []
        assert_rows(content(tmp_path / name), content(cache)[slice(*rows)])
        assert_rows(content(tmp_path / name, "validation"), content(cache, "validation"))
        assert (manifest.parents or [])[0]["rows"] == f"{rows[0]}:{rows[1] or ''}"
    merged = merge([Cache(tmp_path / "a"), Cache(tmp_path / "b")], tmp_path / "ab")
    found = {row["tokens"].numpy().tobytes(): row for row in content(tmp_path / "ab")}
    assert_rows([found[row["tokens"].numpy().tobytes()] for row in content(cache)], content(cache))
    assert merged.splits["validation"] == manifest.splits["validation"]


def test_fractions_are_nested_and_depend_on_no_order(shelf, tmp_path) -> None:
    def tokens(where: Path) -> set[bytes]:
        return {row["tokens"].numpy().tobytes() for row in content(where)}

    merge([shelf(), shelf(rows=5)], tmp_path / "both")
    both = Cache(tmp_path / "both")
    for share in (2, 5, 10):
        subset(both, tmp_path / f"f{share}", fraction=Fraction(1, share))
    sizes = [len(tokens(tmp_path / f"f{share}")) for share in (2, 5, 10)]
    assert sizes == [10, 4, 2]
    assert tokens(tmp_path / "f10") < tokens(tmp_path / "f5") < tokens(tmp_path / "f2")
    subset(Cache(tmp_path / "f2"), tmp_path / "f2-5", fraction=Fraction(1, 5))
    assert tokens(tmp_path / "f2-5") == tokens(tmp_path / "f10")
    subset(both, tmp_path / "all", fraction=Fraction(1, 3), splits=("train", "validation"))
    assert len(Cache(tmp_path / "all")["validation"]) == 1 and Cache(tmp_path / "all").manifest.fidelity is None
    assert Cache(tmp_path / "f2").manifest.fidelity == both.manifest.fidelity


def test_a_merge_warns_of_rows_that_two_of_its_caches_share(shelf, tmp_path, caplog) -> None:
    caplog.set_level("WARNING", logger="kdtrain")
    merge([shelf(), shelf(rows=5)], tmp_path / "both")
    assert not caplog.records
    both = Cache(tmp_path / "both")
    cuts = {
        "head": {"rows": (0, 10)}, "middle": {"rows": (5, 15)}, "tail": {"rows": (10, None)},
        "some": {"fraction": Fraction(1, 5)}, "few": {"fraction": Fraction(1, 10)},
    }  # fmt: skip
    made = {"both": both, "other teacher": shelf(who="two")}
    made |= {name: (subset(both, tmp_path / name, **rows), Cache(tmp_path / name))[1] for name, rows in cuts.items()}
    shared = ["head middle", "middle tail", "both head", "some few", "both few"]
    for pair in [*shared, "head tail", "both other teacher"]:
        caplog.clear()
        one, other = (made[name] for name in pair.split(" ", 1))
        merge([one, other], tmp_path / pair)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == (pair in shared), (pair, lines)
        for line in lines:
            assert line.endswith("have rows of train in common, which will be there twice")
            assert all(str(each.folder) in line for each in (one, other))


REFUSED = {
    "the same": ([{}, {}], "named twice, which adds nothing.*--refine"),
    "coinciding": ([{}, {"number": 24}], "their grids coincide.*--refine"),
    "uneven": ([{}, {"number": 24, "sampling": "grid+1/48"}], "not one even grid.*--refine"),
    "another seed": ([{}, {"seed": 9}], "seed: .* in the one.*--refine"),
    "an old kind": ([{}, {"sampling": "systematic"}], "systematic samples, which do not interleave"),
    "several teachers": ([{}, {"who": "two"}], "several teachers.*--cache-weights"),
    "top-k": ([{"codec": "top_k"}, {"codec": "top_k", "who": "two"}], "only caches of samples alone"),
    "dense": ([{"codec": "dense"}, {"codec": "dense", "who": "two"}], "only caches of samples alone"),
    "tokens": ([{"codec": "tokens"}, {"codec": "tokens", "seed": 8}], "nothing to add"),
    "one": ([{}], "nothing to merge it with"),
    "too many": ([{"number": 200}, {"number": 200, "sampling": "grid+1/400"}], "255 are the most"),
    "some the same": ([{}, {"sampling": "grid+1/24"}, {"rows": 5}], "merge those of the same rows first"),
    "another codec": ([{}, {"number": 20, "rows": 5}], "keep different things .*num_samples: (12|20) in the one"),
    "another mask": ([{}, {"rows": 5, "document_mask": True}], "document_mask"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_merged_is_refused_with_the_reason(shelf, tmp_path, name: str) -> None:
    caches, words = REFUSED[name]
    with pytest.raises(UsageError, match=rf"^[^\n]*(?:{words})[^\n]*$"):
        merge([shelf(**each) for each in caches], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "key, value",
    [
        ("first_sequence", None),
        ("first_sequence", -1),
        ("first_sequence", 7),
        ("sequences", 0),
        ("sequences", 5),
        ("format_version", 3),
        ("parents", [{"digest": "x"}]),
        ("parents", "all"),
    ],
)
def test_a_cut_cache_whose_manifest_contradicts_its_shards_is_refused(shelf, tmp_path, key: str, value: object) -> None:
    """Sealed by a stranger: the numbers that decide which shard holds a row are checked against each other."""
    subset(shelf(), tmp_path / "cut", rows=(2, 9))
    path = tmp_path / "cut" / cache_format.MANIFEST
    record = read_sealed(path)
    place = record if key in ("format_version", "parents") else record["splits"]["train"]["shards"][0]
    place[key] = value
    if value is None:
        del place[key]
    publish_json(path, record, "cache.manifest")
    with pytest.raises((UsageError, RunError), match=r"altered or damaged|first_sequence is|cannot be read"):
        Cache(tmp_path / "cut")["train"].read([0])


def test_what_teachers_wrote_is_counted_in_caches_made_of_others(shelf, tmp_path) -> None:
    how = {"source": "prompts", "generated": {"end_tokens": [*range(0, 64, 3)], "temperature": 1.0}}
    ones, others, plain = shelf(data=how), shelf(rows=20, data=how), shelf(rows=30)

    def counted(cache: Cache, split: str = "train") -> dict[str, int]:
        text = cache[split].text(range(len(cache[split])))
        mask = text["loss_mask"] == 1
        reasons = finish_reasons(text["tokens"], mask, how["generated"]["end_tokens"])
        return {"stop": reasons.count("stop"), "length": reasons.count("length"), "tokens": int(mask.sum())}

    assert ones.manifest.generated == {split: counted(ones, split) for split in ones} and counted(ones)["stop"]
    cut = subset(ones, tmp_path / "cut", rows=(1, 6))
    assert cut.generated == {"train": counted(Cache(tmp_path / "cut")), "validation": counted(ones, "validation")}
    both = merge([ones, others], tmp_path / "both")
    assert both.generated == {"train": counted(Cache(tmp_path / "both")), "validation": counted(ones, "validation")}
    mixed = merge([others, plain], tmp_path / "mixed")
    assert mixed.generated["train"] == counted(others) and mixed.end_tokens == ones.manifest.end_tokens
    assert subset(Cache(tmp_path / "mixed"), tmp_path / "half", fraction=Fraction(1, 2)).generated is None
    summed = merge([ones, shelf(sampling="grid+1/24", data=how)], tmp_path / "sum")
    assert summed.generated == ones.manifest.generated and plain.manifest.generated is None


def test_the_kept_mass_of_appended_caches_is_the_mean_over_their_samples() -> None:
    one = {"split": "validation", "positions": 30, "kept_mass": 0.9, "mass_loss": 0.2}
    other = {"split": "validation", "positions": 10, "kept_mass": 0.5, "mass_loss": 0.8}
    assert joined([one, other]) == {"split": "validation", "positions": 40, "kept_mass": 0.8, "mass_loss": 0.35}
    assert joined([one, dict(one)]) == one
    for unknown in (None, {**other, "kept_mass": None}, {**other, "positions": "many"}):
        assert joined([one, unknown]) is None
