"""The card in every finished cache, and the test vector by which a reader proves itself."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kdtrain.cache.format.manifest import read_manifest
from kdtrain.cache.tools import facts as card
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.files import publish_json, read_sealed
from kdtrain.library import Cache


@pytest.mark.parametrize("codec", ["top_k", "num_samples", "weighted", "both", "whole", "dense", "tokens"])
def test_the_test_vector_is_what_the_reader_decodes_and_verify_compares_it(
    tmp_path: Path, workshop, codecs, codec: str
) -> None:
    folder, spec = workshop.build(tmp_path / "c", codecs[codec]), codecs[codec]
    vector = read_manifest(folder).test_vector
    assert vector is not None and vector["positions"] == [0, 1, 8, 15] and verify_cache(folder) == []
    row = Cache(folder)[vector["split"]][vector["sequence"]]
    for place, at in enumerate(vector["positions"]):
        assert vector["tokens"][place] == row["tokens"][at : at + 2].tolist()
        if codec == "tokens":
            assert vector.keys() == {"split", "sequence", "positions", "tokens"}
            continue
        assert vector["label_logprob"][place] == pytest.approx(row["label_logprob"][at].item(), abs=1e-5)
        if codec == "dense":
            assert vector["ids"][place][0] == row["logprobs"][at].argmax().item()
            assert np.exp(vector["logprobs"][place]).sum() == pytest.approx(1, abs=1e-2)
            continue
        assert vector["ids"][place] == [each for each in row["ids"][at].tolist() if each < spec.vocab_size]
        assert vector["tail"][place] == pytest.approx(row["tail"][at].tolist(), rel=1e-5, abs=1e-5)
        if spec.num_samples:
            assert sum(vector["counts"][place]) == spec.num_samples
        assert ("logprobs" in vector) is not spec.counts_only
    record = read_sealed(folder / "manifest.json")
    record["test_vector"]["tokens"][0][0] += 1
    publish_json(folder / "manifest.json", record, "test")
    assert [line for line in verify_cache(folder) if "its test_vector is not what shard train-00000 holds" in line]


def test_a_manifest_without_a_test_vector_keeps_its_digest(tmp_path: Path, workshop, codecs) -> None:
    folder = workshop.build(tmp_path / "c", codecs["top_k"])
    record = read_sealed(folder / "manifest.json")
    del record["test_vector"]
    publish_json(folder / "manifest.json", record, "test")
    manifest = read_manifest(folder)
    assert manifest.to_json() == read_sealed(folder / "manifest.json") and manifest.test_vector is None
    assert verify_cache(folder) == []


def test_a_finished_cache_has_a_card_and_one_that_somebody_changed_stays(tmp_path: Path, workshop, codecs) -> None:
    own = tmp_path / "c" / card.CARD
    workshop.build(tmp_path / "c", codecs["top_k"])
    text = own.read_text()
    assert card.is_own(own) and read_manifest(tmp_path / "c").digest in text
    assert "kdtrain distill --cache THIS-FOLDER" in text and "h5py" in text
    own.write_text(own.read_text().replace("kdtrain made it", "I made it"))
    changed = own.read_text()
    (tmp_path / "c" / "manifest.json").unlink()
    workshop.build(tmp_path / "c", codecs["top_k"])
    assert own.read_text() == changed and not card.is_own(own)


def test_the_card_of_an_import_and_of_a_merge_says_where_they_are_from_in_words(whole: Path) -> None:
    manifest = read_manifest(whole)
    data = {"source": "a", "messages_column": None, "members": [{"source": "b"}], "appended": ["4ee8"]}
    teacher = {"spec": "T", "weights_digest": None, "dtype": "unknown"}
    origin = {"source": "s.parquet", "layout": "topk", "shift": -1, "kept_mass": 0.84, "kl_at_most": 1.2}
    parents: list = [
        {
            "digest": letter * 64,
            "teacher": {"spec": letter},
            "num_samples": 50,
            "weight": 0.5,
            "sequences": {"train": 1},
        }
        for letter in "ab"
    ]
    settings = dataclasses.replace(manifest.settings, data=data, teacher=teacher)
    text = card.make_card(
        dataclasses.replace(manifest, settings=settings, origin={**origin, "unknown": ["dtype"]}, parents=parents)
    )
    assert (
        "| teacher | T |\n| text | source a |\n" in text and "None" not in text and "{" not in text.split("## Use")[0]
    )
    assert "| imported from | s.parquet in the layout topk, shift -1 |" in text
    assert "| kept mass | 0.84: KL to the whole teacher is at most 1.2 nats; the label's loss - |" in text
    assert "| not known of the teacher | dtype |" in text
    assert "- aaaaaaaaaaaa of a, 50 samples, 0.5 of the sum, 1 sequence of train\n" in text


def test_names_of_strangers_do_not_leave_their_line_of_a_card(tmp_path: Path, workshop, codecs) -> None:
    teacher = {"spec": "evil\n---\n<script>|x|", "weights_digest": "0", "dtype": "bf16"}
    folder = workshop.build(tmp_path / "c", codecs["top_k"], teacher=teacher, data={"source": "a`b\n# c"})
    text = (folder / card.CARD).read_text()
    assert "<script>" not in text.replace(r"\<script\>", "") and "\n# c" not in text
