"""The reporter of a run: it logs and warns, and does not change the training."""

import math
import time
from functools import partial

import pytest
import torch
from torch import nn
from training_kit import events, lines_of, trained

from kdtrain.config.sections import QuantizationConfig
from kdtrain.errors import log
from kdtrain.monitor.progress import one_line
from kdtrain.monitor.rules import History
from kdtrain.monitor.writers import Writers
from kdtrain.precision.loss_scale import LossScale
from kdtrain.testing import tiny_tokenizer
from kdtrain.training import reporter as reporting
from kdtrain.training.reporter import Reporter, gradients_of, sample_texts, unsound


@pytest.fixture
def said(monkeypatch):
    texts = []
    monkeypatch.setattr(log, "warning", texts.append)
    return texts


def reporter_of(run, tokenizer=None, init="scratch"):
    reporter = Reporter(run.config, run.student, run.stepper.planned)
    texts = tokenizer and partial(sample_texts, run.student, run.validation_source, tokenizer, 0)
    reporter.open(0, None, init=init, texts=texts)
    return reporter


def backward(run):
    run.student(run.stepper.source.read(torch.arange(4).numpy()), 32.0).loss.backward()


def test_the_parts_of_a_line_are_those_of_the_step(workshop):
    with workshop.run() as run:
        numbers = {"loss": 2.0, "lr": 1e-3, "grad_norm": 0.5}
        parts = reporter_of(run).finished(7, numbers, checkpoint=4, epochs=0.7)
    kept = {"loss": "loss 2.00", "lr": "lr 1.0e-03"}
    assert parts == {**kept, "checkpoint": "ckpt -3", "memory": "mem +0 MiB"}
    assert one_line("step 7/9", parts) == one_line("step 7/9", kept), "the last two are for the bar alone"


def test_the_present_precision_is_in_the_line_of_a_run_that_switches(workshop):
    shown = {}
    for switches in (True, False):
        with workshop.run(f"run-{switches}", quantization=QuantizationConfig(time_resume=switches)) as run:
            run.student.quantized = "mxfp4"
            reporter = reporter_of(run)
            positions = iter(("quantized", "high"))
            shown[switches] = []
            for run.student.switch.position in positions:
                parts = reporter.finished(1, {"loss": 2.0}, checkpoint=0, epochs=0.0)
                shown[switches].append(parts.get("mode"))
                assert (parts.get("mode") or "") in one_line("step 1/4", parts)
    assert shown == {True: ["mxfp4", run.student.mode], False: [None, None]}


def test_what_is_wrong_is_warned_of_once_and_stays_in_the_line_until_it_is_over(workshop, said):
    with workshop.run() as run:
        reporter = reporter_of(run)
        for step in range(0, 50, 10):
            reporter.validated(step, 5.0, 4.0)
        numbers = {"loss": 2.0, "tokens": 32.0}
        lines = [reporter.finished(step, numbers, checkpoint=0, epochs=0.7) for step in (10, 20)]
        reporter.validated(50, 4.9, 4.0)
        after = reporter.finished(30, numbers, checkpoint=0, epochs=0.7)
    assert [parts["health"] for parts in lines] == ["! plateau"] * 2 and "health" not in after
    assert len(said) == 1 and "the last 4 validations are not below 5.000 of step 0 (teacher 4.000)" in said[0]


def test_a_busy_machine_is_named_once(workshop, monkeypatch):
    texts, load = [], iter([1.0, 9.0, 9.0])
    monkeypatch.setattr(log, "info", lambda *line: texts.append(line[0] % line[1:]))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (next(load), 0.0, 0.0))
    with workshop.run() as run:
        reporter = reporter_of(run)
        for step, named in ((10, 0), (20, 1), (30, 1)):
            reporter.finished(step, {"loss": 2.0, "tokens": 32.0}, checkpoint=0, epochs=0.7)
            assert [text for text in texts if "processes" in text] == [
                "load 9.0 on 2 cores: other processes slow this run"
            ] * named


def test_a_student_without_a_gradient_and_an_implausible_first_loss_are_warned_of_once(workshop, said):
    with workshop.run() as run:
        backward(run)
        reporter = reporter_of(run)
        reporter.backward(1)
        reporter.initial(5.7)
        assert said == []
        run.student.model.register_parameter("orphan", torch.nn.Parameter(torch.ones(1)))
        reporter = reporter_of(run)
        reporter.backward(1)
        reporter.backward(1)
        reporter.initial(9.0)
    assert len(said) == 2 and "orphan" in said[0] and "no gradient" in said[0] and "ln V is 5.704" in said[1]


def test_samples_and_histograms_come_when_they_are_due_and_leave_the_training_as_it_was(workshop, monkeypatch):
    shown = []
    monkeypatch.setattr(Writers, "histograms", lambda self, step, tensors: shown.append(step))
    with workshop.run(eval_freq=2, sample_freq=3) as run:
        reporter = reporter_of(run, tiny_tokenizer(300))
        run.student.train()
        state = torch.get_rng_state()
        for number in range(1, 7):
            reporter.gradients(number)
            reporter.finished(number, {"loss": 1.0}, 0, 0.0)
        assert run.student.training and torch.equal(torch.get_rng_state(), state)
    samples = lines_of(run, "samples.jsonl")
    assert shown == [2, 4, 6]
    assert [line["step"] for line in samples] == [3, 3, 3, 6, 6, 6]
    assert samples[:3] == [line | {"step": 3} for line in samples[3:]]
    with workshop.run("off", sample_freq=0) as run:
        reporter_of(run, tiny_tokenizer(300)).finished(250, {"loss": 1.0}, 0, 0.0)
    assert not (run.config.out / "samples.jsonl").exists()


def test_the_students_texts_go_on_from_the_first_tokens_of_the_validation_split(workshop):
    with workshop.run() as run:
        texts = sample_texts(run.student, run.validation_source, tiny_tokenizer(300), seed=0)
        tokens = run.validation_source.tokens[:3]
        logits_BTV = run.student.model.model.eval()(tokens[:, :4]).logits
        first = logits_BTV[:, -1].argmax(-1)
    prompts = tiny_tokenizer(300).batch_decode(tokens[:, :4].tolist())
    assert [text["prompt"] for text in texts] == prompts
    assert len(texts) == 3 and all(set(text) == {"prompt", "greedy", "sampled"} for text in texts)
    for text, token in zip(texts, first.tolist(), strict=True):
        assert text["greedy"].startswith(tiny_tokenizer(300).decode([token])[:1])


def test_the_numbers_of_a_step_have_the_memory_and_the_share_of_clipped_steps(workshop):
    with workshop.run(clip=1.0) as run:
        reporter = reporter_of(run)
        for number, norm in enumerate((2.0, 0.5, 0.5, 0.5), 1):
            reporter.finished(number, {"grad_norm": norm}, checkpoint=0, epochs=0.0)
    found = lines_of(run, "metrics.jsonl")
    assert [each["clipped_share"] for each in found] == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert all(each["memory_resident_mb"] > 10 for each in found)
    assert [each["checkpoint_age"] for each in found] == [1.0, 2.0, 3.0, 4.0]


def test_memory_growth_is_logged_from_the_warm_up_on(workshop, monkeypatch):
    held = iter((100.0, 150.0, 180.0, 170.0))
    monkeypatch.setattr(reporting, "memory_mb", lambda device: next(held))
    with workshop.run() as run:
        reporter = reporter_of(run)
        reporter.history = History(-48)  # memory is stable after step 1
        parts = [reporter.finished(number, {"loss": 1.0}, checkpoint=0, epochs=0.0) for number in (1, 2, 3, 4)]
    assert [each["memory_growth_mb"] for each in lines_of(run, "metrics.jsonl")] == [0.0, 0.0, 30.0, 20.0]
    assert [each["memory"] for each in parts] == ["mem +0 MiB", "mem +0 MiB", "mem +30 MiB", "mem +20 MiB"]


@pytest.mark.parametrize("nvml", [True, False])
def test_the_memory_of_a_gpu_is_logged_and_with_nvml_its_utilization(workshop, monkeypatch, nvml):
    asked = []

    def utilization(device):
        asked.append(device)
        if not nvml:
            raise ModuleNotFoundError("pynvml")
        return 87

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 2**20)
    logged = []
    monkeypatch.setattr(log, "info", lambda text, *words: logged.append(text % words))
    with workshop.run(log_freq=2) as run:
        monkeypatch.setattr(type(run.student), "device", torch.device("cuda"))
        reporter = reporter_of(run)
        for number in (1, 2, 3, 4):
            reporter.finished(number, {}, checkpoint=0, epochs=0.0)
    found = lines_of(run, "metrics.jsonl")
    assert [(each["memory_allocated_mb"], each["memory_reserved_mb"]) for each in found] == [(3.0, 5.0)] * 4
    assert [each.get("gpu_utilization") for each in found] == ([None, 87.0] * 2 if nvml else [None] * 4)
    assert len(asked) == (2 if nvml else 1)
    said = [text for text in logged if "gpu_utilization" in text]
    assert len(said) == (0 if nvml else 1) and all("pip install 'kdtrain[gpu]'" in text for text in said)


def test_the_time_a_step_waits_for_data_and_the_rate_of_the_last_interval_are_written(workshop):
    class Slow(workshop.source):
        def read(self, indices):
            time.sleep(0.02)
            return super().read(indices)

    with workshop.run(train=Slow(10), steps=3, micro_batch_size=2) as run:
        run.fit()
    found = trained(run)
    assert all(each["data_wait_s"] >= 0.04 for each in found)
    assert ["tok/s_last" in each for each in found] == [False, True, True]
    assert all(0 < each["tok/s_last"] < each["tokens"] / 0.04 for each in found[1:])
    assert not any("loss_scale" in each for each in found)


@pytest.mark.parametrize("waits, warned", [(0.5, 1), (0.05, 0)])
def test_a_run_that_waits_for_its_data_is_warned_once_after_its_first_steps(workshop, said, waits, warned):
    with workshop.run() as run:
        reporter, run_of = reporter_of(run), {"tokens": 100.0, "tok/s_last": 50.0, "grad_norm": 0.0}
        for number in range(1, 150):
            first = number <= 10  # opens files, compiles
            reporter.finished(number, run_of | {"data_wait_s": 2.0 if first else waits}, checkpoint=0, epochs=0.0)
            assert len(said) == (warned if number >= 60 else 0)
    kinds = events(run, "data-wait") if warned else []
    assert [each["step"] for each in kinds] == [60] * warned
    assert not warned or "waited for its data in 25% of the time of the last 50 steps" in said[0]


def test_an_online_teacher_that_computes_while_a_step_waits_is_no_reason_for_a_warning(workshop):
    class Taught(workshop.source):
        overlaps = False

    for source in (Taught(10), workshop.source(10)):
        with workshop.run(train=source) as run:
            numbers = {"data_wait_s": 0.9, "tokens": 1.0, "tok/s_last": 1.0}
            waits = [run.reporter.history.add(number, numbers, 1.0).data_wait for number in range(1, 100)]
        assert any(each is not None for each in waits) == source.overlaps


def test_each_halving_of_the_loss_scale_is_logged_and_an_event(workshop, fault):
    fault("train.gradient:nan:2-3")
    with workshop.run(steps=3) as run:
        run.state.guards.scale = LossScale(True)
        run.fit()
    assert [(each["was"], each["value"], each["step"]) for each in events(run, "loss-scale")] == [
        (2**16, 2**15, 1),
        (2**15, 2**14, 1),
    ]
    assert [each["loss_scale"] for each in trained(run)] == [2**16, 2**14, 2**14]


def test_parameters_without_a_sound_gradient_are_named_and_many_are_counted():
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("good", "unused", "dead", "bad", "frozen")})
    model["frozen"].requires_grad_(False)
    for name, value in (("good", 1.0), ("dead", 0.0), ("bad", 1.0)):
        model[name].weight.grad = torch.full((2, 2), value)
    model["bad"].weight.grad[0, 1] = math.nan
    kinds = {"sound": "good", "without": "unused", "zero": "dead", "non-finite": "bad"}
    assert gradients_of(model) == {kind: [f"{name}.weight"] for kind, name in kinds.items()}
    assert [text.split(" (")[1] for text in unsound(model)] == ["bad.weight)", "unused.weight)", "dead.weight)"]
    [text] = unsound(nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(8))))
    assert text.startswith("8 parameters have no gradient") and "4.weight and 3 more" in text
