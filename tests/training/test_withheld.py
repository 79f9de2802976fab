"""Alpha by withheld text in a run, in a loop of one's own and in a Trainer: what is read, when, what it changes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training_kit import trained
from transformers import Trainer, TrainingArguments

import kdtrain as kd
from kdtrain.checkpoint.store import load
from kdtrain.objective.alpha import MeasuredAlpha
from kdtrain.parallel.layout import RankLayout
from kdtrain.training.guards import SpikeDetector
from kdtrain.training.validate import own_batches
from kdtrain.training.withheld import Withheld, interval

GOLDEN = "tests/golden/cache/sparse"


def known_text(workshop, size=40):
    """Make text that its teacher knows."""
    source = workshop.source(size)
    source.logits += 3 * torch.nn.functional.one_hot(source.tokens[:, 1:], source.vocab_size)
    return source


def test_a_run_resumed_between_two_measurements_ends_with_the_same_bits(workshop, small):
    options = {"steps": 12, "checkpoint_freq": 1, "lr_schedule": "constant", "eval_freq": 100}
    with workshop.run("whole", known_text(workshop), known_text(workshop), **options) as whole:
        whole.fit()
    rows = trained(whole)
    measured = [each["step"] for each in rows if "withheld/share" in each]
    assert len(measured) > 3 and len({each["alpha"] for each in rows}) > 3
    for begin in (measured[1] - 1, measured[1]):  # just before one, and just after
        with workshop.run(f"from-{begin}", known_text(workshop), known_text(workshop), **options) as again:
            saved = load(whole.store.path(f"step-{begin:08d}"))
            again.state.load(saved.tensors, saved.state)
            again.fit()
        expected = whole.state.tensors()
        assert all(torch.equal(each, expected[name]) for name, each in again.state.tensors().items())


def test_how_much_and_how_often_a_run_validates_changes_no_bit_of_it(workshop, small):
    ends = []
    for eval_freq, eval_batches in ((2, 1), (100, 5)):
        options = {"steps": 8, "eval_freq": eval_freq, "eval_batches": eval_batches}
        source = known_text(workshop)
        with workshop.run(f"every-{eval_freq}", known_text(workshop), source, **options) as run:
            run.fit()
        ends.append((run.student.model.state_dict(), [each["alpha"] for each in trained(run)]))
    assert ends[0][1] == ends[1][1] and len({*ends[0][1]}) > 3
    assert all(torch.equal(each, ends[1][0][name]) for name, each in ends[0][0].items())


def test_the_sample_is_spread_over_the_split_and_has_none_of_a_member_without_a_teacher(workshop):
    source = workshop.source(4000)
    sample = Withheld(MeasuredAlpha(), source, 4, 24)
    assert sample.choose(lambda action: action())
    part, counts = sample.parts[""], source.loss_mask.sum(1)
    assert sample.counts == {"": int(counts[part].sum())} and 0.9 * 8192 < sample.counts[""] < 1.4 * 8192
    assert part.step > 1 and part.start == 0 and part[-1] >= 4000 - part.step
    assert sample.every == interval(len(part) * source.facts.seq_len, 24) and not sample.due(1)
    assert [step for step in range(1, 3 * sample.every) if sample.due(step)] == [sample.every + 1, 2 * sample.every + 1]
    assert all(len(each) <= 32 for each in source.reads)
    source.reads.clear()
    batches = [*own_batches(source, part, 4, lambda action: action(), RankLayout())]
    assert sum(int(each.loss_mask.sum()) for each in batches) == sample.counts[""]
    assert [*dict.fromkeys(np.concatenate(source.reads).tolist())] == [*part]
    places = {"a": (range(2000), "dense"), "b": (range(2000, 4000), "none")}
    members = {k: SimpleNamespace(place=v, facts=SimpleNamespace(targets=kind)) for k, (v, kind) in places.items()}
    source.facts = SimpleNamespace(members=members, seq_len=source.facts.seq_len)
    sample = Withheld(MeasuredAlpha(), source, 4, 24)
    assert sample.choose(lambda action: action()) and len(sample.parts["b"]) == 0 and [*sample.counts] == ["a"]
    assert not sample.choose(lambda action: None)


@pytest.mark.parametrize("counted, taken", [(0, 0), (1, 0), (4, 1053), (8, 1053), (32, 257)])
def test_where_most_tokens_are_masked_the_sample_is_denser_and_has_an_end(counted, taken):
    facts = SimpleNamespace(members={}, seq_len=64, targets="dense")

    def read(rows):
        return SimpleNamespace(loss_mask=torch.arange(64).expand(len(rows), -1) < counted)

    source = type("Rows", (), {"facts": facts, "read": staticmethod(read), "__len__": lambda self: 20_000})()
    sample = Withheld(MeasuredAlpha(), source, 4, 24)
    assert sample.choose(lambda action: action())
    assert len(sample.parts[""]) == taken and sample.counts[""] == counted * (taken or 1053)


@pytest.mark.parametrize("broken, found", [(None, None), (90, 90), (30, 30)])
def test_alpha_that_rises_over_text_known_by_heart_is_no_spike_and_a_doubled_loss_is(broken, found):
    watch, confirmed, heart = SpikeDetector(), None, 1.0  # the share of the text that is known by heart
    for step in range(1, 100):
        alpha = min(0.02 * max(step - 20, 0), 0.9)
        heart = max(heart - 0.05 * (3.6 * alpha > 2.4 * (1 - alpha)), 0.0)  # as the gradient of both parts has it
        parts = {"ce": 0.1 + 2.4 * (1 - heart), "kd_T1": 0.4 + 3.6 * heart}
        factor = 2.5 if broken is not None and step >= broken else 1.0
        first = watch.update(step, {name: factor * each for name, each in parts.items()}, alpha)
        confirmed = confirmed or first
    assert confirmed == found


def test_a_student_is_measured_by_the_batches_that_it_is_given(caplog):
    rows = kd.Cache(GOLDEN)["validation"]
    batch = kd.collate([rows[place] for place in range(len(rows))])
    student = kd.Student(kd.testing.tiny_model("llama", 300, seed=3), kd.DistillationLoss()).train()
    student(**batch)
    assert "alpha is 0.9: it follows withheld text" in caplog.text and float(student.loss.alpha.value()) == 0.9
    with pytest.warns(match=r"alpha stays 0.9: \d+ withheld tokens with a label, and 2,048 are needed"):
        few = student.measure([batch])
    assert student.training and few["tokens"] == int(batch["loss_mask"].sum()) < 2048 and few["alpha"] == 0.9
    many, output = student.measure([batch] * 100), student.eval()(**batch)
    for name, each in (("loss", output.ce), ("teacher_loss", output.teacher_ce)):
        assert many[name] == pytest.approx(float(each / output.tokens), rel=1e-5)
    assert many["share"] == pytest.approx(np.clip((many["loss"] - many["teacher_loss"]) / many["kl"], 0, 1), rel=1e-5)
    with pytest.raises(kd.UsageError, match="no effect at a fixed alpha"):
        kd.Student(kd.testing.tiny_model("llama", 300), kd.DistillationLoss(alpha=0.5)).measure([batch])


def test_a_trainer_with_the_callback_measures_before_its_first_step_knows_its_passes_and_resumes(tmp_path, small):
    cache = kd.Cache(GOLDEN)

    def run(folder, **how):
        student, seen = kd.Student(kd.testing.tiny_model("llama", 300, seed=3), kd.DistillationLoss()), []
        measure = student.measure
        student.measure = lambda batches, passes: seen.append((passes, measure(batches, passes))) or seen[-1][1]
        options = {"num_train_epochs": 3, "per_device_train_batch_size": 2, "report_to": "none", "save_steps": 4}
        arguments, more = TrainingArguments(folder, **options, use_cpu=True), [kd.AlphaCallback(cache["validation"], 3)]
        trainer = Trainer(student, arguments, kd.collate, cache["train"], callbacks=more)
        trainer.train(**how)
        return student.loss.alpha, seen, trainer.state.max_steps

    alpha, seen, steps = run(str(tmp_path))
    assert len(seen) == 1 + (steps - 1) // 3 and seen[0][0] == 0.0 and seen[-1][0] >= 1.5
    assert abs(float(alpha.value()) - seen[-1][1]["alpha"]) <= 0.02 * 3 + 1e-9
    again, later, _ = run(str(tmp_path), resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert later == seen[2:] and all(torch.equal(*each) for each in zip(again.buffers(), alpha.buffers(), strict=True))
    with pytest.raises(kd.UsageError, match="AlphaCallback has no rows"):
        kd.AlphaCallback([])


def test_the_callback_takes_evenly_spaced_rows():
    many = [{"loss_mask": torch.ones(128), "at": at} for at in range(640)]
    assert [each["at"] for each in kd.AlphaCallback(many).rows] == [*range(0, 640, 10)]
