"""`kdtrain push` of caches: the hub's real client against a stand-in of its endpoints, and back again by `hf:`."""

import io
import shutil
from pathlib import Path

import pytest
import yaml

from kdtrain.cache.format.manifest import read_manifest
from kdtrain.cache.tools import facts as card
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.errors import RunError, UsageError
from kdtrain.library import Cache
from kdtrain.plugins.push import PushConfig
from kdtrain.plugins.push import command as push
from tests.web import Repository, Web

LICENSES = {"license_text": "cc-by-4.0", "license_teacher": "declined", "license_outputs": "My own"}


@pytest.fixture
def made_cache(made: Path) -> Path:
    return made / "cache"


def config(cache: Path, **changes: object) -> PushConfig:
    return PushConfig(**{"path": cache, "to": "hf:org/cache", "json": True, **LICENSES, **changes})  # type: ignore[arg-type]


def test_a_cache_that_was_pushed_reads_as_the_folder_does_and_shows_a_preview(
    hub: Web, made_cache: Path, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    assert push.main(config(made_cache, private=True)) == 0
    repository = hub.hub["org/cache"]
    tree = repository.commits[-1][1]
    assert repository.private and len(repository.commits) == 2  # one commit names all
    names = {path.relative_to(made_cache).as_posix() for path in made_cache.rglob("*") if path.is_file()}
    assert set(tree) == names | {"preview.parquet", ".gitattributes"}
    text = tree["README.md"].decode()
    found = yaml.safe_load(text.split("---\n")[1])
    assert {"teacher-logits", "knowledge-distillation"} <= set(found["tags"])
    assert found["configs"] == [{"config_name": "preview", "data_files": "preview.parquet"}]
    assert (found["license"], found["license_name"]) == ("other", "my own")
    assert "- of the text: cc-by-4.0" in text and "- of the teacher: declined" in text and "h5py" in text
    preview = pq.read_table(io.BytesIO(tree["preview.parquet"])).to_pylist()
    here = Cache(made_cache)["train"]
    assert len(preview) == min(100, len(here))
    assert len(preview[0]["best"]) == len(preview[0]["label_logprob"]) == min(64, here[0]["loss_mask"].numel())
    assert preview[0]["text"] and preview[0]["label_logprob"][0] == pytest.approx(
        here[0]["label_logprob"][0].item(), abs=1e-3
    )
    assert verify_cache("hf:org/cache") == []
    assert read_manifest(made_cache) == Cache("hf:datasets/org/cache").manifest


def test_an_upload_that_broke_off_resumes_and_what_is_there_is_not_sent_again(hub: Web, made_cache: Path) -> None:
    last = sorted((made_cache / "shards").glob("*.h5"))[-1]
    from kdtrain.files import file_digest

    hub.fail(file_digest(last), "403", times=1)
    with pytest.raises((UsageError, RunError)):
        push.main(config(made_cache))
    assert len(hub.hub["org/cache"].commits) == 1  # nothing is named yet
    sent = len(hub.uploads)
    assert push.main(config(made_cache)) == 0
    assert len(hub.uploads) == len(set(hub.uploads)) > sent
    hub.uploads.clear()
    assert push.main(config(made_cache)) == 0
    assert len(hub.uploads) == 0


def test_licences_must_be_filled_or_declined(made_cache: Path) -> None:
    with pytest.raises(UsageError, match="--license-teacher, --license-outputs missing") as error:
        PushConfig(path=made_cache, to="hf:org/cache", license_text="mit")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "case, words",
    [
        ("another", r"holds another cache \(digest 0000"),
        ("damaged", "its content changed"),
        ("revision", "give hf:ORG/NAME"),
        ("remote", "is not a folder"),
    ],
)
def test_what_cannot_be_pushed_is_one_line(hub: Web, made_cache: Path, tmp_path: Path, case: str, words: str) -> None:
    changes: dict[str, object] = {}
    folder = tmp_path / "copy"
    if case == "another":
        hub.hub["org/cache"] = Repository()
        hub.hub["org/cache"].commit({"manifest.json": b'{"digest": "' + b"0" * 64 + b'"}'})
    elif case == "damaged":
        shutil.copytree(made_cache, folder)
        shard = next((folder / "shards").glob("*.h5"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    elif case == "revision":
        changes["to"] = "hf:org/cache@v1"
    elif case == "remote":
        folder = Path("hf:org/other")
    with pytest.raises(UsageError, match=words) as error:
        push.main(config(folder if case in ("damaged", "remote") else made_cache, **changes))
    assert "\n" not in str(error.value)
    assert "org/cache" not in hub.hub or "index.h5" not in hub.hub["org/cache"].commits[-1][1]


def test_a_card_that_kdtrain_did_not_write_stays_on_the_hub(hub: Web, made_cache: Path) -> None:
    hub.hub["org/cache"] = Repository()
    hub.hub["org/cache"].commit({card.CARD: b"# My data\n"})
    assert push.main(config(made_cache)) == 0
    assert hub.hub["org/cache"].commits[-1][1][card.CARD] == b"# My data\n"
