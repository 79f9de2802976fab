"""A mixture of caches as a data set: 3:1 by any loader, with one codec or several, and without a teacher."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import kdtrain as kd
from kdtrain.data import order
from kdtrain.objective.batch import Collator
from kdtrain.objective.mixed import MixedTargets, join
from kdtrain.testing import tiny_model
from kdtrain.training.sources.cache import CachedSource
from kdtrain.training.sources.mixture import mix
from tests.token_kinds import train
from tests.tokenizers.view_kit import CODECS, foreign_cache


@pytest.fixture(scope="module")
def caches(tmp_path_factory, workshop, codecs):
    """Build caches of 10 sequences by codec; `other` is a second one of the codec of `both`."""
    folder, found = tmp_path_factory.mktemp("mixture"), {}
    for name, codec, seed in (("both", "both", 3), ("other", "both", 4), ("drawn", "num_samples", 3)):
        found[name] = kd.Cache(workshop.build(folder / name, codecs[codec], seed=seed))
    found["bare"] = kd.Cache(workshop.build(folder / "bare", codecs["tokens"]))
    found["dense"] = kd.Cache(workshop.build(folder / "dense", codecs["dense"]))
    return found


def of(caches, *names):
    return [caches[name]["train"] for name in names]


def sources(caches, *names, weights=None):
    splits = {split: [CachedSource(caches[name][split]) for name in names] for split in ("train", "validation")}
    return mix(splits, weights)


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_of_a_loader_draws_three_to_one(caches, shuffle):
    mixture = kd.Mixture(of(caches, "both", "other"), [3, 1])
    loader = DataLoader(mixture, 4, shuffle=shuffle, collate_fn=kd.collate)
    drawn = [int(mixture.order.members(np.array([each]))[0]) for each in mixture.order.batch(0, 0, len(mixture))]
    assert len(mixture) == 20 and drawn.count(0) == 15
    read = torch.cat([batch["tokens"] for batch in loader])
    wanted = torch.stack([mixture[place]["tokens"] for place in range(20)])
    assert sorted(read.tolist()) == sorted(wanted.tolist())
    assert shuffle or torch.equal(read, wanted)


def test_the_epochs_of_a_mixture_follow_each_other_as_those_of_a_run(caches):
    mixture = kd.Mixture(of(caches, "both", "other"), [3, 1], seed=5)
    source = sources(caches, "both", "other", weights=[3, 1])["train"]
    stream = source.order(5).batch(0, 60)
    for epoch in range(3):
        mixture.set_epoch(epoch)
        read = torch.stack([each["tokens"] for each in mixture.__getitems__(list(range(20)))])
        assert torch.equal(read, source.read(stream[20 * epoch : 20 * epoch + 20]).tokens)
    assert torch.equal(mixture[-1]["tokens"], read[-1])
    with pytest.raises(IndexError, match="20 is not a place among the 20"):
        _ = mixture[20]


def test_batches_of_one_member_each_draw_in_proportion_where_codecs_differ(caches):
    mixture = kd.Mixture(of(caches, "both", "drawn", "bare"), [2, 1, 1])
    with pytest.raises(kd.UsageError, match=r"different codecs.*mixture\.batches\(8\)"):
        kd.collate([mixture[place] for place in range(8)])
    batches = mixture.batches(4)
    loader = DataLoader(mixture, batch_sampler=batches, collate_fn=kd.collate)
    assert len(loader) == len(list(batches)) == 4 + 2 + 2
    drawn = {"both": 0, "drawn": 0, "bare": 0}
    for batch in loader:
        name = "bare" if "replay" in batch else {8: "both", 12: "drawn"}[batch["counts"].shape[-1]]
        drawn[name] += len(batch["tokens"])
    assert tuple(drawn.values()) == mixture.order.quotas == (15, 8, 7)
    assert sorted(place for batch in batches for place in batch) == list(range(30))
    whole = mixture.batches(4, drop_last=True)
    assert len(list(whole)) == len(whole) and {len(each) for each in whole} == {4}


def test_a_student_learns_from_every_batch_of_a_mixture(caches):
    mixture = kd.Mixture(of(caches, "both", "drawn", "bare"))
    assert mixture.temperature_range == (1.0, 1.0)
    student = kd.Student(tiny_model("llama", 64), kd.DistillationLoss(alpha=0.9))
    for batch in DataLoader(mixture, batch_sampler=mixture.batches(4), collate_fn=kd.collate):
        output = student(**batch)
        mean = (0.1 * output.ce + 0.9 * output.kd + 0.9 * output.ce_alone) / output.tokens
        assert float(output.loss.detach()) == pytest.approx(float(mean), rel=1e-5)
        assert ("replay" in batch) == (float(output.ce_alone) > 0) == (float(output.kd) == 0)
        output.loss.backward()
    (loss_of_tokens,) = DataLoader(caches["bare"]["train"], 10, collate_fn=kd.collate)
    with pytest.raises(kd.UsageError, match="no targets of a teacher"):
        student(**loss_of_tokens)


def test_the_checked_range_of_temperatures_is_that_of_all_members(caches):
    mixture = kd.Mixture(of(caches, "both", "drawn"))
    warm = kd.Student(tiny_model("llama", 64), kd.DistillationLoss(temperature=2.0))
    (batch, *_) = DataLoader(mixture, batch_sampler=mixture.batches(4), collate_fn=kd.collate)
    with pytest.raises(kd.UsageError, match="leaves the cache's range of 1 to 1"):
        warm(**batch)


def test_a_mixture_of_other_data_sets_is_one_too(caches):
    some = torch.utils.data.Subset(caches["both"]["train"], [1, 3, 5])
    mixture = kd.Mixture([some, caches["other"]["train"]])
    read = [each["tokens"].tolist() for each in mixture.__getitems__(list(range(13)))]
    assert sum(each["tokens"].tolist() in read for each in some) == 3


def test_what_does_not_fit_together_is_refused(caches, tmp_path, workshop, codecs):
    masked = kd.Cache(workshop.build(tmp_path / "masked", codecs["both"], document_mask=True))
    for members, weights, said in (
        ((*of(caches, "both"), masked["train"]), None, "a document mask: no, the other a document mask: yes"),
        (of(caches, "both", "other"), [1], "weights above 0"),
        (of(caches, "both", "other"), [1, 1e-6], "weight 1e-06 of member 2 gives it no sequence"),
        ([1, 2], None, "data sets with a length"),
        ((), None, "hold at least a sequence"),
    ):
        with pytest.raises(kd.UsageError, match=said):
            kd.Mixture(members, weights)
    with pytest.raises(kd.UsageError, match="batch_size 0"):
        kd.Mixture(of(caches, "both")).batches(0)


def test_the_rows_of_two_tokenizers_are_not_mixed_and_views_for_one_are(tmp_path):
    cache = foreign_cache(tmp_path / "cache", *CODECS["top-k"])["train"]
    view, other = (cache.aligned(train("bpe")) for _ in range(2))
    for members in ([cache, view], [view, torch.utils.data.Subset(cache, [1, 2])]):
        with pytest.raises(
            kd.UsageError, match=r"cannot be mixed: one has a tokenizer of \d+ entries, the other a tok"
        ):
            kd.Mixture(members)
    mixture = kd.Mixture([view, torch.utils.data.Subset(other, range(4))])
    assert mixture.temperature_range == (1.0, 1.0)
    model = tiny_model("llama", len(train("bpe")))
    batch = kd.collate([mixture[0], mixture[len(mixture) - 1]])
    assert kd.Student(model, kd.DistillationLoss(), data=mixture)(**batch).kd > 0
    third = cache.aligned(train("bpe"))
    third._index = dataclasses.replace(third._index, column=third._index.column.flip(0))
    with pytest.raises(kd.UsageError, match="the members of the mixture have different cells"):
        kd.Student(model, kd.DistillationLoss(), data=kd.Mixture([view, third]))


def test_members_with_one_codec_become_one_set_of_targets_and_others_stay_apart(caches):
    two = sources(caches, "both", "other")["train"].read(np.array([0, 12, 3]))
    alone = Collator().batch(kd.collate([caches["both"]["train"][0]]))
    assert not two.targets.parts and torch.equal(two.targets.ids[:16], alone.targets.ids)
    assert torch.equal(two.tokens[1], caches["other"]["train"][2]["tokens"])
    mixed = sources(caches, "both", "bare", "dense")["train"].read(np.array([0, 1, 10, 20, 2]))
    assert [(rows, type(each).__name__) for rows, each in mixed.targets.parts] == [
        (32, "SparseTargets"),
        (16, "NoneType"),
        (16, "DenseTargets"),
        (16, "SparseTargets"),
    ]
    assert torch.equal(mixed.tokens[2], caches["bare"]["train"][0]["tokens"])
    assert len(mixed.targets) == 80 and mixed.each(lambda tensor: tensor.clone()).targets.parts[0][0] == 32


def test_the_loss_of_mixed_targets_is_the_sum_of_that_of_its_parts(caches):
    source = sources(caches, "both", "bare", "dense")["train"]
    student = kd.Student(tiny_model("llama", 64), kd.DistillationLoss(alpha=0.7))
    together = source.read(np.array([0, 1, 10, 20]))
    apart = [source.read(np.array(each)) for each in ([0, 1], [10], [20])]
    tokens = float(together.loss_mask.sum())
    outputs = [student(each, tokens) for each in apart]
    whole = student(together, tokens)
    for name in whole._fields[:-1]:
        parts = sum(float(getattr(each, name).detach()) for each in outputs)
        assert float(getattr(whole, name).detach()) == pytest.approx(parts, rel=1e-5), name
    gradients = []
    for losses in ([whole.loss], [each.loss for each in outputs]):
        student.zero_grad()
        for loss in losses:
            loss.backward()
        gradients.append(torch.cat([each.grad.flatten() for each in student.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)


def test_parts_join_only_where_their_tensors_fit(caches):
    targets = [Collator().batch(kd.collate([caches[name]["train"][0]])).targets for name in ("both", "drawn")]
    assert join([(16, targets[0])]) is targets[0] and join([(16, None)]) is None
    assert [rows for rows, _ in join([(16, targets[0]), (16, targets[1])]).parts] == [16, 16]
    assert join([(16, None), (16, None)]) is None
    kept = MixedTargets(((16, targets[0]), (16, None))).where(torch.ones(32, dtype=torch.bool))
    assert [*kept.shown()] == [f"0.{name}" for name in targets[0].shown()]


def test_a_mixture_of_more_members_than_caches_of_orders_is_read_as_before():
    mixture = order.MixedOrder.weighted([3] * 70)
    first = mixture.batch(1, 0, 420)
    assert np.array_equal(first, mixture.batch(1, 0, 420)) and sorted(first[:210]) == list(range(210))


def test_the_names_of_members_are_the_shortest_that_differ(caches, tmp_path):
    for name in ("a/t", "b/t"):
        shutil.copytree(caches["both"].folder, tmp_path / name)
    found = [CachedSource(kd.Cache(tmp_path / name)["train"]) for name in ("a/t", "b/t")]
    with pytest.raises(kd.UsageError, match=r"a/t and .*b/t are the same"):
        mix({"train": found, "validation": found}, None)
    assert list(sources(caches, "both", "other")["train"].facts.members) == ["both", "other"]
