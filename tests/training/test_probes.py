"""The measurements of --sanity, on students and batches with known results."""

import contextlib
import dataclasses
import math
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn

from kdtrain.cache.format.codec import CodecSpec, decode, encode_sequences
from kdtrain.cache.format.compression import Coding
from kdtrain.config import OptimizerConfig
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import DenseTargets, SparseTargets
from kdtrain.training.optimizers import make_optimizer
from kdtrain.training.probes import correlation, dead_units, entropy_floor, graph_breaks, kd_at, overfit, remedy


def batch_of(rows, mask=None, segments=None):
    tokens = torch.tensor(rows)
    shape = (len(rows), tokens.shape[1] - 1)
    mask = torch.ones(shape, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    segments = torch.zeros(shape, dtype=torch.int64) if segments is None else torch.tensor(segments)
    return Batch(tokens, mask, segments, None)


def test_sequences_that_differ_from_the_first_token_on_can_be_memorized():
    assert entropy_floor([batch_of([[1, 2, 3, 2, 3], [2, 2, 3, 3, 2]])], False) == 0.0


def test_a_beginning_with_several_continuations_costs_their_entropy():
    # after 1 comes 2, 2, 3: the entropy of (2/3, 1/3) for three of nine tokens; after that everything is known
    floor = entropy_floor([batch_of([[1, 2, 5, 6], [1, 2, 5, 6]]), batch_of([[1, 3, 5, 6]])], False)
    assert floor == pytest.approx(-(2 * math.log(2 / 3) + math.log(1 / 3)) / 9)


def test_masked_tokens_are_not_part_of_the_floor():
    rows = [[1, 2, 5], [1, 3, 5]]
    assert entropy_floor([batch_of(rows, mask=[[0, 1], [0, 1]])], False) == 0.0
    assert entropy_floor([batch_of(rows, mask=[[0, 0], [0, 0]])], False) == 0.0


def test_with_a_document_mask_each_document_has_its_own_prefix():
    rows, segments = [[9, 1, 2, 1, 3]], [[0, 1, 1, 2]]
    assert entropy_floor([batch_of(rows, segments=segments)], False) == 0.0
    # both documents begin with 1, one continues with 2 and one with 3; the other two tokens are known
    assert entropy_floor([batch_of(rows, segments=segments)], True) == pytest.approx(2 * math.log(2) / 4)


def first(run, count=4):
    return run.stepper.source.read(np.arange(count))


def weights(run):
    return {name: tensor.clone() for name, tensor in run.student.model.state_dict().items()}


def test_a_student_overfits_towards_the_floor(workshop):
    with workshop.run() as run:
        batches = [first(run)]
        optimizer = make_optimizer(run.student, OptimizerConfig(lr=1e-2), 0.01)
        losses = list(islice(overfit(run.student, optimizer, batches, run.config.optimizer), 60))
        floor = entropy_floor(batches, False)
    assert losses[0] == pytest.approx(math.log(300), rel=0.05)
    assert floor <= losses[-1] < floor + 0.1 * (losses[0] - floor)


def test_the_loss_that_is_overfitted_is_the_mean_over_all_its_micro_batches(workshop):
    with workshop.run() as run:
        parts = [run.stepper.source.read(np.arange(start, start + 2)) for start in (0, 2)]
        optimizer = make_optimizer(run.student, OptimizerConfig(lr=3e-4), 0.01)
        whole = next(overfit(run.student, optimizer, [first(run)], run.config.optimizer))
    with workshop.run("again") as run:
        optimizer = make_optimizer(run.student, OptimizerConfig(lr=3e-4), 0.01)
        cut = next(overfit(run.student, optimizer, parts, run.config.optimizer))
    assert cut == pytest.approx(whole, rel=1e-5)


def own_targets(run, batch, kind):
    """The student itself as the teacher of `batch`."""
    logits_NV = run.student.model.eval().logits(batch.tokens[:, :-1]).detach().flatten(0, 1)
    dense = DenseTargets.from_logits(logits_NV, batch.tokens[:, 1:].flatten())
    if kind == "dense":
        return dense
    if kind == "samples":
        spec = CodecSpec(kind="sparse", vocab_size=logits_NV.shape[1], num_samples=200)
        tokens = batch.tokens.numpy()
        shape = batch.tokens[:, 1:].shape
        sure_BTV = 3 * (logits_NV / logits_NV.std()).view(*shape, -1)  # of an even teacher counts say nothing
        kept = encode_sequences(sure_BTV, batch.tokens[:, 1:], spec, seed=0, split="train", first=0)
        coding = Coding.fit(tokens, kept, spec)
        return decode(coding.unpack(tokens, coding.pack(tokens, kept)), spec)
    top = dense.logprobs.topk(6)
    nothing_N = torch.zeros(len(logits_NV))
    return SparseTargets(
        ids=torch.cat([top.indices, torch.full_like(top.indices[:, :1], 2**31)], 1),
        logprobs=torch.cat([top.values, torch.full_like(top.values[:, :1], 7.0)], 1),
        counts=torch.zeros(len(logits_NV), 7),
        tail=torch.zeros(len(logits_NV), 2),
        label_logprob=dense.label_logprob,
        logit_mean=dense.logprobs.mean(-1),
        logit_std=nothing_N,
        top_k=7,
        num_samples=0,
        knots=(1.0,),
    )


@pytest.mark.parametrize("kind, least", [("dense", 0.9999), ("sparse", 0.9999), ("samples", 0.9)])
def test_a_student_that_is_its_teacher_correlates_with_it_and_another_one_does_not(workshop, kind, least):
    with workshop.run() as run:
        batch = first(run)
        batch = dataclasses.replace(batch, targets=own_targets(run, batch, kind))
        same = correlation(run.student, batch)
        with torch.no_grad():
            for parameter in run.student.model.parameters():
                parameter.copy_(torch.randn_like(parameter) * parameter.std().nan_to_num(1.0))
        other = correlation(run.student, batch)
    assert least < same < 1.0001
    assert abs(other) < 0.5


def test_without_a_teacher_there_is_no_correlation(workshop):
    with workshop.run() as run:
        batch = first(run)
        assert correlation(run.student, dataclasses.replace(batch, targets=None)) is None
        masked = dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
        assert correlation(run.student, masked) is None


def test_units_that_never_move_are_counted_and_their_layers_named(workshop):
    with workshop.run() as run:
        layer = run.student.model.model.model.layers[1]
        before = dead_units(run.student, first(run))
        with torch.no_grad():
            layer.mlp.up_proj.weight[:5] = 0.0
        dead, units, names = dead_units(run.student, first(run))
    assert before[0] == 0 and before[2] == []
    assert (dead, names) == (5, ["model.layers.1.mlp.down_proj"])
    # per layer: q, k, v and gate, up read the width of 32, o the 32 of all heads, down the 64 in between
    assert units == before[1] == 2 * (5 * 32 + 32 + 64)


@pytest.mark.parametrize("divergence", ["forward-kl", "reverse-kl"])
def test_the_distillation_term_and_its_gradient_agree_at_every_temperature(workshop, divergence):
    with workshop.run(divergence=divergence) as run:
        found = [kd_at(run.student, first(run), temperature) for temperature in (1.0, 2.0, 4.0)]
        before = weights(run)
        again = kd_at(run.student, first(run), 1.0)
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())
        assert all(parameter.grad is None for parameter in run.student.parameters())
    assert again == found[0]
    assert [each.slope for each in found] == pytest.approx([1.0] * 3, abs=0.01)
    assert found[0].kd > found[1].kd > found[2].kd
    assert [each.loss for each in found] == pytest.approx([each.temperature**2 * each.kd for each in found], rel=1e-5)


def test_a_gradient_that_forgot_the_factor_of_the_loss_is_seen(workshop, monkeypatch):
    from kdtrain.training.student import Student

    whole = Student.forward

    def forgetful(self, batch, normalizer):
        output = whole(self, batch, normalizer)
        loss = output.loss
        return output._replace(loss=loss.detach() + (loss - loss.detach()) / 4)

    monkeypatch.setattr(Student, "forward", forgetful)
    with workshop.run() as run:
        assert kd_at(run.student, first(run), 2.0).slope == pytest.approx(4.0, rel=0.02)


def test_probing_leaves_the_settings_of_the_step_as_they_were(workshop):
    with workshop.run(alpha=0.25, temperature=3.0) as run:
        settings = (
            run.student.loss.alpha,
            run.student.temperature,
            run.student.mode,
            run.student.backbone,
            run.student.training,
        )
        kd_at(run.student, first(run), 2.0)
        correlation(run.student, first(run))
        dead_units(run.student, first(run))
        after = (
            run.student.loss.alpha,
            run.student.temperature,
            run.student.mode,
            run.student.backbone,
            run.student.training,
        )
        assert after == settings
        assert isinstance(run.student.temperature, nn.Module)


@pytest.mark.parametrize("early", [False, True])
def test_a_break_of_the_graph_is_named(workshop, monkeypatch, early):
    from kdtrain.models.head import SplitModel

    whole = SplitModel._run

    def breaking(self, tokens_BT, segments_BT):
        tokens_BT = tokens_BT if early else tokens_BT + 0
        torch._dynamo.graph_break()
        return whole(self, tokens_BT, segments_BT)

    with workshop.run() as run:
        monkeypatch.setattr(SplitModel, "_run", breaking)
        [found] = graph_breaks(run.student, first(run))
        assert run.student.training
    assert "torch._dynamo.graph_break()" in found
    assert ("test_probes.py:" in found) is not early


def prints(hidden):
    print("width", hidden.shape[-1])
    return hidden


def branches(hidden):
    return hidden if hidden.sum() > 0 else hidden + 1


def through_numpy(hidden):
    return hidden + float(np.mean(hidden.detach().tolist()))


@pytest.mark.parametrize(
    "cause, advice",
    [
        (prints, "printing or logging in the forward: take it out"),
        (branches, "depends on a tensor's values: use torch.where"),
        (through_numpy, "NumPy in the forward: compute it with torch"),
    ],
)
def test_a_break_by_print_by_a_tensors_value_or_by_numpy_has_its_line_and_its_remedy(cause, advice):
    class Small(nn.Module):
        """As little of a student as `graph_breaks` looks at: a real one takes a quarter of a minute to trace."""

        document_mask, mode, device, compiled = False, "fp32", torch.device("cpu"), None
        eager = contextlib.nullcontext

        def __init__(self):
            super().__init__()
            self.model = nn.Embedding(9, 4)
            self.backbone = lambda tokens_BT, segments_BT: cause(self.model.weight[tokens_BT] * 2)

    found = graph_breaks(Small(), batch_of([[1, 2, 3]]))
    line = cause.__code__.co_firstlineno + 1
    assert any(f"test_probes.py:{line}: " in each and advice in each for each in found), found


def test_the_hints_of_dynamo_are_no_cause():
    reason = "Failed to trace builtin operator\n  Explanation: `breakpoint`\n  Hint: a logging function (e.g. `print`)"
    assert remedy(reason) is None
    assert remedy(reason, "    print(hidden)") is not None


def test_a_whole_graph_has_no_break(workshop):
    with workshop.run() as run:
        assert graph_breaks(run.student, first(run)) == []
