"""A builder refuses too little text, foreign tokens, and a teacher with non-finite logits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtrain.cache.build.writer import CacheBuilder, write_cache
from kdtrain.cache.read.reader import CacheReader
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.errors import RunError, UsageError


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_without_a_token_that_counts_is_refused_before_the_teacher_works(
    tmp_path: Path, workshop, codecs, split: str
) -> None:
    def teacher(tokens, segments):
        raise AssertionError

    splits = {"train": workshop.rows(3), "validation": workshop.rows(3)}
    splits[split] = [replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in splits[split]]
    with pytest.raises(UsageError, match=f"synthetic: no token of the {split} sequences counts"):
        write_cache(tmp_path / "c", workshop.settings(codecs["both"]), splits, teacher=teacher)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path, workshop, codecs) -> None:
    writer = CacheBuilder(tmp_path / "c", workshop.settings(codecs["tokens"]), teacher=None)
    with pytest.raises(UsageError, match="vocabulary has only 64"):
        writer.build("train", workshop.rows(3, vocab_size=500))


def test_a_non_finite_sequence_is_masked_out_and_counted(tmp_path: Path, workshop, codecs) -> None:
    """One of 1,200 sequences: its loss is masked, all others are unchanged."""
    sound, spec = workshop.teacher(), codecs["both"]

    def broken(tokens, segments):
        logits = sound(tokens, segments)
        hit = (tokens == bad_row).all(1)
        return logits.masked_fill(hit[:, None, None], float("nan"))

    bad_row = torch.from_numpy(list(workshop.rows(6))[5].tokens[:-1].astype(np.int64))
    manifests = []
    for name, teacher in (("sound", sound), ("broken", broken)):
        splits = {"train": workshop.rows(1200), "validation": workshop.rows(3, seed=1)}
        settings = workshop.settings(spec, sequences_per_shard=400, sequences={"train": 1200, "validation": 3})
        manifests.append(write_cache(tmp_path / name, settings, splits, teacher=teacher, batch_size=64))
    assert [manifest.splits["train"]["broken"] for manifest in manifests] == [0, 1]
    assert manifests[0].fidelity == manifests[1].fidelity
    one, other = (CacheReader(tmp_path / name, "train").read([4, 5, 6]) for name in ("sound", "broken"))
    assert not other.loss_mask[1].any()
    assert torch.equal(one.loss_mask[::2], other.loss_mask[::2])
    assert other.targets is not None
    for value in vars(other.targets).values():
        assert not torch.is_tensor(value) or torch.isfinite(value).all()
    assert verify_cache(tmp_path / "broken") == []


def test_more_than_one_broken_sequence_in_a_thousand_stops_the_build(tmp_path: Path, workshop, codecs) -> None:
    calls = []

    def teacher(tokens, segments):
        calls.append(len(tokens))
        return workshop.teacher()(tokens, segments) * float("nan")

    settings = workshop.settings(codecs["top_k"], sequences={"train": 4000, "validation": 3})
    splits = {"train": workshop.rows(4000), "validation": workshop.rows(3)}
    with pytest.raises(RunError, match=r"non-finite logits for .* more than one in a thousand"):
        write_cache(tmp_path / "c", settings, splits, teacher=teacher, batch_size=3)
    assert sum(calls) < 20
    for dtype, remedy in (("float32", "look at its weights"), ("float16", "load it in bfloat16 or float32")):
        settings = workshop.settings(codecs["top_k"], teacher={"dtype": dtype})
        with pytest.raises(RunError, match=remedy):
            write_cache(tmp_path / dtype, settings, workshop.splits(), teacher=teacher, batch_size=3)
    once = lambda tokens, segments: (  # noqa: E731
        workshop.teacher()(tokens, segments).index_fill(0, torch.tensor(0), float("inf"))
    )
    with pytest.raises(RunError, match=r"for 1 of 4 sequences \(the first is train 0\)"):
        write_cache(tmp_path / "d", workshop.settings(codecs["top_k"]), workshop.splits(), teacher=once, batch_size=10)
