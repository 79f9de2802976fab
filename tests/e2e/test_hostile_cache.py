"""A cache that a stranger made and sealed ends every command in one line, and the command itself ends."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cache"))

from hostile_kit import LINKS, SHAPES

from tests.hostile import seal

CASES = {
    "link": (LINKS["external link"], "it has a soft or external link"),
    "80 GB": (SHAPES["80 GB of common entries"], "'dictionary/common' has 40000000000 rows instead of 1 to 300"),
}


@pytest.fixture(scope="module", params=CASES)
def hostile(request, bench, cached) -> str:
    """Make a fault in the first shard of the cache `hostile`, whose digests all match; return the expected reason."""
    shutil.rmtree(bench.root / "hostile", ignore_errors=True)
    shutil.copytree(bench.root / "cache", bench.root / "hostile")
    change, reason = CASES[request.param]
    change(bench.root / "hostile/shards/train-00000.h5")
    seal.cache(bench.root / "hostile")
    return reason


@pytest.mark.timeout(200)
def test_training_from_a_hostile_cache_fails_in_one_line(bench, forks, hostile):
    shutil.rmtree(bench.root / "new", ignore_errors=True)
    argv = ("distill", "--cache", "hostile", "--student", "student.toml", "--out", "new", "--steps", 4)
    done = forks.run(*argv, *bench.eager, *bench.fast)
    assert done.code == 1
    assert f"hostile/shards/train-00000.h5 cannot be read ({hostile})" in done.refusal()
    assert "kdtrain verify hostile" in done.refusal()


def test_verify_names_a_hostile_shard_and_its_fault(forks, hostile):
    done = forks.run("verify", "hostile", "--json")
    assert done.code == 1
    assert f'"problems": ["hostile/shards/train-00000.h5: {hostile}"]' in done.stdout.replace('\\"', '"')


@pytest.mark.parametrize("hostile", ["link"], indirect=True)
def test_a_hostile_shard_is_refused_by_evaluate(bench, distilled, forks, hostile):
    done = forks.run("evaluate", "--student", "run", "--cache", "hostile", "--split", "train")
    assert done.code == 1
    assert f"hostile/shards/train-00000.h5 cannot be read ({hostile})" in done.refusal()
