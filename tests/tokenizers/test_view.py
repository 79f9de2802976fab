import copy
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from kdtrain.cache.format.names import holds_nothing
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.reader import CacheReader, collate
from kdtrain.data.bytes import TokenBytes
from kdtrain.data.packed import PackedRow
from kdtrain.errors import RunError, UsageError
from kdtrain.files import Lock, publish_json
from kdtrain.library import Cache
from kdtrain.models.output_head import HeadPart
from kdtrain.objective.loss import DistillationLoss, distillation_loss
from kdtrain.testing import tiny_model
from kdtrain.tokenizers import alignment as alignments
from kdtrain.tokenizers import transcode, view
from kdtrain.tokenizers import view_builder as views
from kdtrain.tokenizers.cells import Cells
from kdtrain.tokenizers.teacher_cells import MOST_CELLS, condensed
from kdtrain.tokenizers.view import identity_of
from kdtrain.tokenizers.view_builder import build_view
from kdtrain.tokenizers.view_format import ViewRecord
from kdtrain.training.sources.aligned import AlignedSource
from kdtrain.training.student import Student
from tests.fetched import files_of
from tests.token_kinds import TEXTS, train
from tests.tokenizers.view_kit import CODECS, ROWS, SEQ_LEN, foreign_cache, made_cache, packed


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(views, "_ROWS", ROWS)


@pytest.fixture(scope="module", params=CODECS.values(), ids=CODECS)
def each_cache(request, tmp_path_factory):
    return foreign_cache(tmp_path_factory.mktemp("view") / "cache", *request.param)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return foreign_cache(tmp_path_factory.mktemp("view") / "cache", *CODECS["samples"])


def by_cell(view, whole, position, prefix, own=None):
    """Compute the teacher's masses of cells at a position of the cache.

    prefix: the number of a prefix of student's tokens, 0 for none; the masses are then of what follows it. own: the
    student's token there, which counts as one of 20 samples.
    """
    masses, spelling = np.zeros(view.cells.count + 1), view.spelling
    for token, mass in zip(*(each[position].tolist() for each in whole.targets.listed()), strict=True):
        if token < len(view.cells.of_teacher):
            following = int(spelling.next(np.array([token]), np.array([prefix]))[0])
            masses[view.cells.of_student[following] if prefix and following >= 0 else -1] += mass * bool(prefix)
            masses[view.cells.of_teacher[token]] += mass * (not prefix)
    if prefix and own is not None and masses[:-1].any():
        masses[view.cells.of_student[own]] += 1 / 20
    return masses[:-1] / masses[:-1].sum() if prefix and masses[:-1].any() else masses[:-1]


def cells_at(view, targets, place):
    found, kept = np.zeros(view.cells.count), targets.near.ids[place] < view.cells.count
    found[targets.near.ids[place][kept]] = targets.near.resolved().listed()[1][place][kept]
    return found


def test_a_batch_has_the_teachers_numbers_for_the_same_bytes(each_cache, tmp_path):
    view = build_view(tmp_path / "data", each_cache, train("gpt2"))
    reader, plain = view["train"], each_cache["train"]
    batch = reader.read([3, 0])
    whole = plain.read(range(len(plain)))
    labels = whole.tokens[:, 1:].flatten()
    rows = reader.rows([3, 0])
    source = torch.from_numpy(rows["source"]).flatten()
    targets, prefix = batch.targets, torch.from_numpy(rows["prefix"]).flatten()
    own = batch.tokens[:, 1:].flatten()
    assert targets.common().float().mean() > 0.5
    for place in torch.nonzero(source >= 0).flatten().tolist():
        expected = by_cell(view, whole, int(source[place]), int(prefix[place]), own[place])
        if prefix[place] and not each_cache.manifest.settings.codec.num_samples:
            expected *= 0  # a top-k says nothing of the rest within a token
        assert targets.common()[place] == expected.any()
        assert not expected.any() or np.allclose(cells_at(view, targets, place), expected, atol=1e-6)
    # of the teacher's labels between the first and the last known place of a row, each counts once, with its bytes
    sizes = torch.from_numpy(TokenBytes.of(train("llama3")).lengths)
    for row in range(2):
        part = slice(row * SEQ_LEN, (row + 1) * SEQ_LEN)
        known = [place for place in range(part.start, part.stop) if source[place] >= 0 and targets.compared[place]]
        theirs = slice(int(source[known[0]]), int(source[known[-1]]) + 1)
        assert targets.label_logprob[part].sum() == pytest.approx(whole.targets.label_logprob[theirs].sum().item())
        assert targets.teacher_bytes[part].sum() == sizes[labels[theirs]].sum()


def test_of_text_that_the_teacher_wrote_the_filler_is_left_out_and_the_end_is_the_students(tmp_path):
    tokenizer, student = copy.deepcopy(train("llama3")), train("gpt2")
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    ends = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    rows = []
    for text in TEXTS[:2] * 2:
        ids = [*tokenizer.encode(text, add_special_tokens=False)[:8], *ends]
        tokens = np.full(SEQ_LEN + 1, tokenizer.pad_token_id, np.int32)
        tokens[:9] = ids
        mask = (np.arange(SEQ_LEN) >= 4) & (np.arange(SEQ_LEN) < 8)
        rows.append(PackedRow(tokens, mask, np.zeros(SEQ_LEN, np.int32)))
    splits, data = {"train": rows, "validation": rows}, {"generated": {"end_tokens": ends}}
    cache = made_cache(tmp_path / "cache", tokenizer, splits, data=data, kind="sparse", top_k=5)
    view = build_view(tmp_path / "data", cache, student)
    assert "given: <|pad|> is left out" in view.record.events
    text = "".join(tokenizer.decode(row.tokens[:8]) + "<|im_end|>" for row in rows)
    found = view["train"].rows(range(len(view["train"])))["tokens"]
    assert len(found) > 1 and text.startswith(student.decode([found[0, 0], *found[:, 1:].ravel()]))
    assert AlignedSource(view, "train").facts.end_tokens == (student.convert_tokens_to_ids("<|im_end|>"),)


def whole_distributions(folder, texts, seq_len):
    """Make a cache of whole distributions, of a teacher of the Llama 3 kind."""
    rows = packed(texts, train("llama3"), seq_len)
    return made_cache(folder, train("llama3"), {"train": rows, "validation": rows[:1]}, seq_len, kind="dense")


def test_rows_that_need_only_the_end_of_the_teachers_have_its_numbers(tmp_path):
    cache = whole_distributions(tmp_path / "cache", ["Some words, of which there are many. " * 40] * 3, 300)
    view = build_view(tmp_path / "data", cache, train("gpt2", 300), seq_len=30)
    stored = view["train"].rows(range(len(view["train"])))
    for first in (0, 160):
        usable = [row for row in range(len(stored)) if (stored["source"][row] >= first).all()]
        apart = [row for row in usable if len(np.unique(stored["source"][row] // 300)) == 1]
        alone = [view["train"].read([row]).targets.near.logprobs for row in apart]
        assert apart and torch.equal(torch.cat(alone), view["train"].read(apart).targets.near.logprobs)


def test_whole_distributions_have_the_likeliest_cells_also_within_tokens(tmp_path):
    cache = whole_distributions(tmp_path / "cache", TEXTS, SEQ_LEN)
    view = build_view(tmp_path / "data", cache, train("gpt2"))
    order = range(len(view["train"]) - 1, -1, -1)
    stored, targets = view["train"].rows(order), view["train"].read(order).targets
    source, prefix = (stored[name].ravel() for name in ("source", "prefix"))
    assert torch.equal(targets.compared, torch.from_numpy(source >= 0)) and (prefix > 0).sum() > 3
    whole = cache["train"].read(range(len(cache["train"])))
    for place in np.flatnonzero(source >= 0):
        expected, found = by_cell(view, whole, source[place], prefix[place]), cells_at(view, targets, place)
        expected /= expected.sum()
        least = np.sort(expected)[-MOST_CELLS:].min()
        assert np.allclose(found[found > 0], expected[found > 0], rtol=1e-4) and (expected[found == 0] <= least).all()


def test_whole_distributions_come_to_the_host_as_cells_once_however_many_rounds_they_take(tmp_path, monkeypatch):
    cache = whole_distributions(tmp_path / "cache", TEXTS, SEQ_LEN)
    reader, found, moves, rounds = build_view(tmp_path / "data", cache, train("gpt2"))["train"], [], [], []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moves.append(tensor) or tensor)
    for size in (3, 10**6):
        monkeypatch.setitem(view._AT_ONCE, "cpu", size)
        moves.clear()
        with mock.patch.object(view, "condensed", wraps=condensed) as each:
            found.append(reader.read([0, 1]).targets)
        rounds.append(each.call_count)
        assert len(moves) == 1 + len(found[-1].near._tensors())
    assert rounds[0] > 3 * rounds[1]
    for name, tensor in found[0].near._tensors().items():
        assert torch.equal(tensor, getattr(found[1].near, name))


def test_the_same_tokenizer_gives_the_ordinary_loss_to_the_bit(each_cache, tmp_path):
    reader = build_view(tmp_path / "data", each_cache, train("llama3"))["train"]
    assert len(reader) >= len(each_cache["train"]) - 1 and reader.view.record.tallies["train"].disagree <= 1
    size = each_cache.manifest.vocab_size
    hidden = torch.randn(2 * SEQ_LEN, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(size, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = []
    for batch in (each_cache["train"].read([2, 5]), reader.read([2, 5])):
        out = distillation_loss(
            hidden,
            HeadPart(weight),
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


def test_a_build_that_was_killed_ends_in_the_same_files(cache, tmp_path):
    def stop(rows):
        if rows > 2 * ROWS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_view(tmp_path / "killed", cache, train("gemma"), progress=stop)
    assert (tmp_path / "killed" / "train-00002.npy").exists()
    for name in ("whole", "killed"):
        build_view(tmp_path / name, cache, train("gemma"))
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "killed")


def test_a_view_of_something_else_and_a_damaged_one_are_refused(cache, tmp_path):
    folder = tmp_path / "data"
    build_view(folder, cache, train("gpt2"))
    with pytest.raises(UsageError, match=r"the view of another tokenizer"):
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


def test_a_view_is_made_in_no_folder_of_other_files_and_through_no_link(cache, tmp_path):
    mine = tmp_path / "mine"
    (mine / "tokenizer").mkdir(parents=True)
    for name in ("cells.npy", "train-00000.npy", "tokenizer/notes.txt", ".train-00000.npy.1.tmp"):
        (mine / name).write_text("mine")
    before = files_of(mine)
    linked, inside = tmp_path / "linked", tmp_path / "inside"
    linked.symlink_to(mine)
    inside.mkdir()
    (inside / "tokenizer").symlink_to(mine)
    with pytest.raises(UsageError, match="mine holds files that are not a view; name another folder"):
        build_view(mine, cache, train("gpt2"))
    for folder in (linked, inside):
        with pytest.raises(UsageError, match="is a link, and nothing is written through links"):
            build_view(folder, cache, train("gpt2"))
    settings, tokens = cache.manifest.settings, CodecSpec(kind="tokens", vocab_size=2048)
    packed = tmp_path / "packed"
    packed.mkdir()
    publish_json(packed / "settings.json", dataclasses.replace(settings, codec=tokens, teacher=None).to_json(), "x")
    with pytest.raises(views.OtherViewError, match="packed holds packed text, and not a view"):
        build_view(packed, cache, train("gpt2"))
    publish_json(packed / "settings.json", settings.to_json(), "x")
    with pytest.raises(UsageError, match="packed holds files that are not a view") as refused:
        build_view(packed, cache, train("gpt2"))
    assert not isinstance(refused.value, views.OtherViewError)  # a cache is not moved aside
    assert files_of(mine) == before


def test_a_build_killed_before_its_first_record_leaves_a_folder_that_belongs_to_no_run(cache, tmp_path, monkeypatch):
    left = []

    def stop(path, *_):
        left.extend(each.name for each in path.parent.iterdir())
        assert holds_nothing(path.parent)
        raise KeyboardInterrupt

    monkeypatch.setattr(views, "publish_json", stop)
    with pytest.raises(KeyboardInterrupt):
        build_view(tmp_path / "data", cache, train("gpt2"))
    assert len(left) == 1


def test_a_finished_view_needs_no_lock_and_a_builder_of_the_same_one_is_waited_for(cache, tmp_path, monkeypatch):
    folder, real, waiting = tmp_path / "data", views.copy_tokenizer, []
    with ThreadPoolExecutor(1) as pool:

        def begun(*given):
            waiting.append(pool.submit(build_view, folder, Cache(cache.folder), train("gpt2")))
            with pytest.raises(UsageError, match="another process is making another view"):
                build_view(folder, cache, train("gpt2"), seq_len=SEQ_LEN + 1)
            time.sleep(0.2)
            return real(*given)

        monkeypatch.setattr(views, "copy_tokenizer", begun)
        made = build_view(folder, cache, train("gpt2"))
        assert waiting[0].result().record == made.record
    assert len(waiting) == 1
    held = Lock(folder / ".building-0", "held")
    assert build_view(folder, cache, train("gpt2")).record == made.record
    held.release()


def test_a_view_of_very_many_shards_is_read(tmp_path):
    shards = [{"sequences": 1024, "sha256": "0" * 64}] * 12_000
    publish_json(tmp_path / "view.json", {"shards": {"train": shards}}, "x")
    assert (tmp_path / "view.json").stat().st_size > 2**20
    with pytest.raises(UsageError, match="is not the record of a view"):  # and not: it has more than 1,048,576 bytes
        ViewRecord.read(tmp_path)


def test_a_split_without_a_row_of_the_student_is_refused(cache, tmp_path):
    view = build_view(tmp_path / "data", cache, train("gpt2"), seq_len=4000)
    with pytest.raises(UsageError, match=r"the text of 'train' in .* is less than one row of 4000 tokens"):
        view["train"]


def test_two_views_that_were_measured_in_other_last_bits_are_the_same(cache, tmp_path, monkeypatch):
    one = build_view(tmp_path / "one", cache, train("gpt2"))
    monkeypatch.setattr(views, "_entropy_kept", lambda *_: 0.25)
    other = build_view(tmp_path / "other", cache, train("gpt2"))
    assert one.record != other.record and identity_of(one) == identity_of(other)
    assert identity_of(one) != identity_of(build_view(tmp_path / "third", cache, train("gemma")))


def test_documents_left_out_are_counted_and_too_many_are_refused_before_the_end(tmp_path, monkeypatch):
    """A student of Qwen's kind rewrites texts with loose accents."""
    for name, value in (("_ENOUGH", 50), ("_MERGED_FROM", 256), ("_AT_ONCE", 8)):
        monkeypatch.setattr(views, name, value)
    monkeypatch.setattr(transcode, "_BATCH", 256)
    plain, loose = "caf\u00e9 au lait", "cafe\u0301"
    few, many = [plain] * 300 + [loose, plain] * 3, [plain] * 100 + ([loose] + [plain] * 20) * 2
    caches = []
    for name, each in (("few", few), ("many", many)):
        rows = packed([*each, *[plain] * 280], train("gpt2"))
        caches.append(made_cache(tmp_path / name, train("gpt2"), {"train": rows, "validation": rows}, kind="tokens"))
    tally = build_view(tmp_path / "whole", caches[0], train("qwen")).record.tallies["train"]
    assert (tally.left_out, tally.documents) == (3, 586)
    with pytest.raises(UsageError, match=r"2 of 1.. documents cannot be carried over.*rewrites a text"):
        build_view(tmp_path / "data", caches[1], train("qwen"))
    assert not (tmp_path / "data" / "view.json").exists()


def test_of_training_text_that_is_not_wanted_only_what_cells_are_merged_from_is_read(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(views, "_AT_ONCE", 2)
    monkeypatch.setattr(views, "_MERGED_FROM", 3 * SEQ_LEN)
    monkeypatch.setattr(transcode, "_BATCH", 2 * SEQ_LEN)
    real, read = CacheReader.text, []

    def text(reader, indices):
        read.extend(indices if reader.split == "train" else [])
        return real(reader, indices)

    monkeypatch.setattr(CacheReader, "text", text)
    part = build_view(tmp_path / "part", cache, train("gpt2"), splits=("validation",))
    assert [*part.record.shards] == ["validation"] and max(read) < len(cache["train"]) / 2
    whole = build_view(tmp_path / "whole", cache, train("gpt2"))
    assert np.array_equal(part.cells.of_student, whole.cells.of_student) and max(read) == len(cache["train"]) - 1


def test_cells_that_disagree_too_often_are_refused(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(
        alignments, "merge", lambda cells, *_: dataclasses.replace(cells, of_teacher=cells.of_teacher[::-1].copy())
    )
    view = build_view(tmp_path / "data", cache, train("gpt2", 1200))
    with pytest.raises(UsageError, match=r"in different cells at .* give the student another tokenizer"):
        view["train"]


@pytest.mark.parametrize("student", ["gpt2", "llama3"])
def test_an_aligned_split_is_a_data_set_whose_items_have_the_loss_of_the_batch(each_cache, tmp_path, student):
    data = each_cache["train"].aligned(train(student))
    kept = each_cache["train"].aligned(train(student), folder=tmp_path / "kept")
    assert len(data) == len(kept) and torch.equal(data[-1]["tokens"], kept[len(kept) - 1]["tokens"])
    assert [*kept.view.record.shards] == ["train", "validation"] and [*data.view.record.shards] == ["train"]
    loader = DataLoader(data, batch_size=3, collate_fn=collate, num_workers=1)
    model = tiny_model("llama", len(train(student)), seed=0)
    for start, named in zip((0, 3), loader, strict=False):
        found = []
        for inputs in (named, {"batch": data.read(range(start, start + 3))}):
            learner = Student(model, DistillationLoss(), data=data)
            learner.zero_grad()
            out = learner(**inputs)
            out.loss.backward()
            found.append([out.loss, out.kd, *(each.grad.clone() for each in learner.parameters())])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)) and found[0][1] > 0
    with pytest.raises(UsageError, match=r"give the data set to the student too: Student\(model, loss, data=...\)"):
        Student(model, DistillationLoss())(**named)
    with pytest.raises(UsageError, match="has no tensor 'compared'; make batches of the student's data set"):
        learner(**collate([{name: each for name, each in data[0].items() if name != "compared"}]))


def test_what_the_cells_keep_is_measured_without_an_array_of_rows_and_cells(each_cache):
    size = each_cache.manifest.vocab_size
    every = np.arange(size) * 2**22
    assert views._entropy_kept(each_cache["train"], Cells(every, every, size * 2**22)) == pytest.approx(1.0)
    assert views._entropy_kept(each_cache["train"], Cells(every * 0, every * 0, 1)) < 0.5
