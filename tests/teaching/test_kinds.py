"""Kinds of teacher: one that knows no more than a top-k makes caches, and what a kind cannot do is one line."""

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

import kdtrain as kd
from kdtrain.cache.format.codec import keep
from kdtrain.cache.write.answers import ShardAnswers
from kdtrain.config.choices import TEACHERS
from kdtrain.config.sections import CodecConfig, DataConfig
from kdtrain.models.head import split
from kdtrain.models.loading import load_student, model_digest
from kdtrain.models.spec import ModelSpec
from kdtrain.objective.batch import Batch
from kdtrain.parallel.layout import RankLayout
from kdtrain.teaching.local import LocalTeacher
from kdtrain.teaching.teacher import Teacher
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder

CPU = torch.device("cpu")
TABLE = (3 * torch.randn(300, 300, generator=torch.Generator().manual_seed(0))).log_softmax(-1)


class Server(Teacher):
    """A server that reports the most likely entries."""

    vocab_size, digest = 300, "v1"
    asked: ClassVar[list[tuple[str, int, int]]] = []

    def answers(self, settings):
        found = ShardAnswers()
        found.rows = lambda rows: (rows, lambda: self.kept(rows, settings.codec))
        return found

    def kept(self, rows, codec):
        self.asked.append((rows.split, rows.first, len(rows)))
        top = TABLE[torch.from_numpy(rows.tokens[:, :-1].astype(np.int64))].topk(codec.top_k)
        labels = TABLE[rows.tokens[:, :-1], rows.tokens[:, 1:]].double().numpy()
        parts = zip(top.indices.numpy(), top.values.double().numpy(), labels, strict=True)
        arrays = [keep(*part, codec) for part in parts]
        return {name: np.stack([each[name] for each in arrays]) for name in arrays[0]}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TEACHERS.help()  # plugins register themselves once a process, and must not be forgotten with the kind of this test
    for name in ("entries", "modules", "_help"):
        monkeypatch.setattr(TEACHERS, name, dict(getattr(TEACHERS, name)))
    kd.register_teacher("server")(Server)
    Server.asked.clear()
    write_model_folder(tmp_path / "teacher", tiny_model("llama", 300, seed=1), tiny_tokenizer(300))
    (tmp_path / "server.toml").write_text("kind = 'server'\ntokenizer = 'teacher'\n")
    (tmp_path / "text.txt").write_text("".join(f"line {n} of the text, {n * n}\n\n" for n in range(400)))
    return tmp_path


def caching(spec, **options):
    data = DataConfig(data="text.txt", seq_len=16, num_sequences=9, validation_sequences=2, num_workers=0)
    return kd.CacheTeacherConfig(teacher=spec, out="cache", data=data, codec=CodecConfig(top_k=8), **options)


def test_a_teacher_that_gives_a_top_k_is_asked_for_each_missing_batch_once_and_its_cache_is_right_at_T_1(bench):
    config = caching("server.toml", batch_size=4, sequences_per_shard=5)
    cache = kd.cache_teacher(config)
    assert sorted(Server.asked) == [("train", 0, 4), ("train", 4, 1), ("train", 5, 4), ("validation", 0, 2)]
    assert cache.temperature_range == (1.0, 1.0) and cache.manifest.fidelity is None
    for row in cache["train"]:
        top = TABLE[row["tokens"][:-1]].topk(8)
        assert torch.equal(row["ids"].long(), top.indices)
        torch.testing.assert_close(row["logprobs"].float(), top.values, rtol=0, atol=2e-2)
    (bench / "cache" / "manifest.json").unlink()
    for path in (bench / "cache" / "shards").glob("train-00001.*"):
        path.unlink()
    Server.asked.clear()
    kd.cache_teacher(config)
    assert Server.asked == [("train", 5, 4)]


def test_what_a_kind_cannot_do_is_refused_in_one_line(bench):
    given = SimpleNamespace(teacher="server.toml", student="teacher", data=DataConfig(data="text.txt", seq_len=16))
    with pytest.raises(kd.UsageError, match="server gives a top-k only; make a cache with cache-teacher"):
        kd.distill(kd.DistillConfig(**vars(given), out="run", steps=1))
    with pytest.raises(kd.UsageError, match="the kind of teacher serverr is unknown; perhaps you meant 'server'"):
        Teacher.open(ModelSpec(name="m", kind="serverr", tokenizer="teacher"), CPU, "fp32")
    with pytest.raises(kd.UsageError, match="kind = 'server' is of a teacher; a student's layers are local"):
        load_student(ModelSpec.read("server.toml"), vocab_size=None, seed=0, device="cpu")
    teacher = kd.Teacher(ModelSpec.read("server.toml"), CPU, "fp32")
    with pytest.raises(kd.UsageError, match="of kind server is not sharded; leave --teacher-parallel out"):
        teacher.prepare(mesh=object())
    with pytest.raises(kd.UsageError, match="--teacher-tensor-parallel cannot cut a teacher of kind server"):
        teacher.cut(RankLayout(tensor_size=2), alike=1)
    with pytest.raises(kd.UsageError, match="of kind server gives no hidden states; leave --hidden-loss out"):
        teacher.layer_widths()


def test_a_local_teacher_says_the_same_to_a_run_and_to_a_cache(bench):
    model = split(tiny_model("llama", 300, seed=1).eval())
    teacher = Teacher.open(ModelSpec.read("teacher"), CPU, "fp32")
    assert isinstance(teacher, LocalTeacher) and teacher.vocab_size == 300
    teacher.load()
    teacher.prepare(compile=True)
    assert teacher.digest == model_digest(model)
    tokens = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens, torch.ones(2, 8, dtype=torch.bool), torch.zeros(2, 8, dtype=torch.int64), None)
    logits = teacher.logits(tokens[:, :-1], None)
    torch.testing.assert_close(logits, model.logits(tokens[:, :-1]).detach())
    taught = teacher.targets(batch, 290, layers=(1, 2))
    expected = logits[..., :290].log_softmax(-1).flatten(0, 1)
    torch.testing.assert_close(taught.targets.resolved().logprobs, expected)
    assert [each.shape for each in taught.states] == [(16, width) for width in teacher.layer_widths()[1:3]]
