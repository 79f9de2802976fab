import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from kdtrain.cache import view as views
from kdtrain.cache.codec import CodecSpec
from kdtrain.cache.manifest import CacheSettings
from kdtrain.cache.reader import Cache, collate
from kdtrain.cache.view import build_view
from kdtrain.cache.view_rows import ViewReader
from kdtrain.cache.writer import write_cache
from kdtrain.data import alignment as alignments
from kdtrain.data.cells import Cells
from kdtrain.data.corpus import Document
from kdtrain.data.packing import PackedRow, pack
from kdtrain.errors import RunError, UsageError
from kdtrain.models.loading import tokenizer_digest
from kdtrain.models.output_head import OutputHead
from kdtrain.objective.cells import CellIndex
from kdtrain.objective.loss import DistillationLoss, distillation_loss
from kdtrain.testing import tiny_model
from kdtrain.training.sources.aligned import AlignedSource
from kdtrain.training.student import Student
from tests.token_kinds import TEXTS, train

SEQ_LEN = 12
ROWS = 4


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(views, "_ROWS", ROWS)


@pytest.fixture(scope="module", params=[(0, 20), (5, 0)], ids=["samples", "top-k"])
def cache(request, tmp_path_factory):
    """Of a teacher with a tokenizer of the Llama 3 kind."""
    folder, tokenizer = tmp_path_factory.mktemp("view") / "cache", train("llama3")
    size, (top_k, num_samples) = len(tokenizer), request.param
    codec = CodecSpec(kind="sparse", vocab_size=size, top_k=top_k, num_samples=num_samples)
    settings = CacheSettings(
        codec=codec,
        seq_len=SEQ_LEN,
        tokenizer_size=size,
        tokenizer_digest=tokenizer_digest(tokenizer),
        sequences_per_shard=8,
        data={"source": "texts"},
    )
    texts = {"train": TEXTS * 2, "validation": TEXTS[:2]}
    splits = {
        split: pack([Document(f"{n}", text=each) for n, each in enumerate(found)], tokenizer, SEQ_LEN)
        for split, found in texts.items()
    }
    table = 2 * torch.randn(size, size, generator=torch.Generator().manual_seed(1))
    write_cache(folder, settings, splits, teacher=lambda tokens, _: table[tokens], batch_size=3, tokenizer=tokenizer)
    return Cache(folder)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".building"}


def test_a_batch_has_the_teachers_numbers_for_the_same_bytes(cache, tmp_path):
    view = build_view(tmp_path / "data", cache, train("gpt2"))
    reader, plain = view["train"], cache["train"]
    batch = reader.read([3, 0])
    whole = plain.read(range(len(plain)))
    labels = whole.tokens[:, 1:].flatten()
    rows = reader.rows([3, 0])
    source = torch.from_numpy(rows["source"]).flatten()
    targets = batch.targets
    assert torch.equal(targets.at_boundary, source >= 0) and targets.at_boundary.float().mean() > 0.5
    mass = whole.targets.listed()[1]
    for place in torch.nonzero(targets.at_boundary).flatten().tolist():
        by_cell = np.zeros(view.cells.count + 1)
        ids = whole.targets.ids[source[place]]
        known = ids < len(view.cells.of_teacher)
        np.add.at(by_cell, view.cells.of_teacher[ids[known]], mass[source[place]][known])
        found = np.zeros_like(by_cell)
        kept = targets.near.ids[place] < view.cells.count
        found[targets.near.ids[place][kept]] = targets.near.resolved().listed()[1][place][kept]
        assert np.allclose(found[:-1], by_cell[:-1], atol=1e-6)
    own = batch.tokens[:, 1:].flatten()
    for end in torch.nonzero(targets.length).flatten().tolist():
        length, others = int(targets.length[end]), int(rows["others"].ravel()[end])
        first = int(source[end - length + 1])
        theirs = whole.targets.label_logprob[first : first + others].sum()
        assert targets.label_logprob[end] == pytest.approx(theirs.item(), abs=1e-5)
        text = train("gpt2").decode(own[end - length + 1 : end + 1])
        assert text == train("llama3").decode(labels[first : first + others])


def test_of_text_that_the_teacher_wrote_the_filler_is_left_out_and_the_end_is_the_students(tmp_path):
    tokenizer, student = copy.deepcopy(train("llama3")), train("gpt2")
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    size, ends = len(tokenizer), [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    rows = []
    for text in TEXTS[:2] * 2:
        ids = [*tokenizer.encode(text, add_special_tokens=False)[:8], *ends]
        tokens = np.full(SEQ_LEN + 1, tokenizer.pad_token_id, np.int32)
        tokens[:9] = ids
        mask = (np.arange(SEQ_LEN) >= 4) & (np.arange(SEQ_LEN) < 8)
        rows.append(PackedRow(tokens, mask, np.zeros(SEQ_LEN, np.int32)))
    settings = CacheSettings(
        codec=CodecSpec(kind="sparse", vocab_size=size, top_k=5),
        seq_len=SEQ_LEN,
        tokenizer_size=size,
        tokenizer_digest=tokenizer_digest(tokenizer),
        data={"source": "texts", "generated": {"end_tokens": ends}},
    )
    table = torch.randn(size, size, generator=torch.Generator().manual_seed(1))
    made = {"teacher": lambda tokens, _: table[tokens], "batch_size": 3, "tokenizer": tokenizer}
    write_cache(tmp_path / "cache", settings, {"train": rows, "validation": rows}, **made)
    view = build_view(tmp_path / "data", Cache(tmp_path / "cache"), student)
    assert "given: <|pad|> is left out" in view.record.events
    text = "".join(tokenizer.decode(row.tokens[:8]) + "<|im_end|>" for row in rows)
    found = view["train"].rows(range(len(view["train"])))["tokens"]
    assert len(found) > 1 and text.startswith(student.decode([found[0, 0], *found[:, 1:].ravel()]))
    assert AlignedSource(view, "train", None).facts.end_tokens == (student.convert_tokens_to_ids("<|im_end|>"),)


def test_the_same_tokenizer_gives_the_ordinary_loss_to_the_bit(cache, tmp_path):
    reader = build_view(tmp_path / "data", cache, train("llama3"))["train"]
    reader.chunks = False
    assert len(reader) >= len(cache["train"]) - 1 and reader.view.record.tallies["train"]["disagree"] <= 1
    size = cache.manifest.vocab_size
    hidden = torch.randn(2 * SEQ_LEN, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(size, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = []
    for batch in (cache["train"].read([2, 5]), reader.read([2, 5])):
        out = distillation_loss(
            hidden,
            OutputHead(weight),
            batch.tokens[:, 1:].flatten(),
            batch.loss_mask.flatten(),
            batch.targets,
            temperature=1.0,
            alpha=0.9,
            vocab_size=size,
            normalizer=20.0,
        )
        found.append([out.loss, out.ce, out.kd, *torch.autograd.grad(out.loss, weight)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_a_student_of_labels_shifted_by_one_ends_with_worse_cells(cache, tmp_path, monkeypatch, seed):
    right = build_view(tmp_path / "data", cache, train("gpt2"))["train"]
    shifted, rows = copy.copy(right), right.rows
    right.chunks = shifted.chunks = False

    def one_later(indices):
        found = rows(indices).copy()
        found["source"] = np.where(found["source"] > 0, found["source"] - 1, -1)
        found["length"] = 0
        return found

    monkeypatch.setattr(shifted, "rows", one_later)
    every, losses = range(len(right)), []
    for data in (right, shifted):
        learner = Student(tiny_model("llama", len(train("gpt2")), seed=seed), DistillationLoss(alpha=1.0))
        optimizer, batch = torch.optim.AdamW(learner.parameters(), 1e-2), data.read(every)
        for _ in range(30):
            optimizer.zero_grad()
            learner(batch=batch).loss.backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(learner(batch=right.read(every)).loss.item())
    assert losses[0] + 0.1 < losses[1]


def test_a_killed_build_resumes_to_the_same_files(cache, tmp_path, monkeypatch):
    whole = build_view(tmp_path / "whole", cache, train("gemma"))
    assert len(whole["train"]) > 3 * ROWS
    real, stops = views.publish_json, [2, 4, 6]

    def stop(path, record, label):
        done = real(path, record, label)
        stops[0] -= 1
        if not stops[0]:
            del stops[0]
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(views, "publish_json", stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            build_view(tmp_path / "killed", cache, train("gemma"))
    monkeypatch.setattr(views, "publish_json", real)
    build_view(tmp_path / "killed", cache, train("gemma"))
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "killed")


def test_a_view_of_something_else_and_a_damaged_one_are_refused(cache, tmp_path):
    folder = tmp_path / "data"
    build_view(folder, cache, train("gpt2"))
    with pytest.raises(UsageError, match=r"the view of another run .another tokenizer"):
        build_view(folder, cache, train("gemma"))
    build_view(folder, cache, train("gpt2"))
    shard = folder / "train-00000.npy"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(RunError, match=r"train-00000.npy cannot be read .its SHA-256 differs."):
        build_view(folder, cache, train("gpt2"))["train"]
    (folder / "view.json").write_text("{}")
    with pytest.raises(UsageError, match=r"view.json cannot be read"):
        build_view(folder, cache, train("gpt2"))


def test_cells_that_disagree_too_often_are_refused(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(
        alignments, "merge", lambda cells, *_: dataclasses.replace(cells, of_teacher=cells.of_teacher[::-1].copy())
    )
    view = build_view(tmp_path / "data", cache, train("gpt2", 1200))
    with pytest.raises(UsageError, match=r"in different cells at .* use --cross-tokenizer chunks"):
        view["train"]
    assert len(ViewReader(view, "train", cells=False)) == len(ViewReader(view, "train", cells=False, chunks=False))


@pytest.mark.parametrize("terms", [(True, True), (False, True), (True, False)], ids=["both", "chunks", "cells"])
@pytest.mark.parametrize("student", ["gpt2", "llama3"])
def test_an_aligned_split_is_a_data_set_whose_items_have_the_loss_of_the_batch(cache, tmp_path, student, terms):
    cells, chunks = terms
    data = cache["train"].aligned(train(student), cells=cells, chunks=chunks)
    kept = cache["train"].aligned(train(student), folder=tmp_path / "kept", cells=cells, chunks=chunks)
    assert len(data) == len(kept) and torch.equal(data[-1]["tokens"], kept[len(kept) - 1]["tokens"])
    assert [*kept.view.record.shards] == ["train", "validation"] and [*data.view.record.shards] == ["train"]
    loader = DataLoader(data, batch_size=3, collate_fn=collate, num_workers=1)
    model = tiny_model("llama", len(train(student)), seed=0)
    for start, named in zip((0, 3), loader, strict=False):
        found = []
        for inputs in (named, {"batch": data.read(range(start, start + 3))}):
            learner = Student(model, DistillationLoss())
            learner.zero_grad()
            out = learner(**inputs)
            out.loss.backward()
            found.append([out.loss, out.kd, *(each.grad.clone() for each in learner.parameters())])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)) and found[0][1] > 0
    with pytest.raises(UsageError, match="this process has not opened"):
        CellIndex.by_key(5)


def test_what_the_cells_keep_is_measured_without_an_array_of_rows_and_cells(cache):
    size = cache.manifest.vocab_size
    every = np.arange(size) * 2**22
    assert views._entropy_kept(cache["train"], Cells(every, every, size * 2**22)) == pytest.approx(1.0)
    assert views._entropy_kept(cache["train"], Cells(every * 0, every * 0, 1)) < 0.5
