"""The hidden-state loss inside a step: counted over all tokens, compiled, and read from models of many shapes."""

import pytest
import torch

from kdtrain.config.sections import ObjectiveConfig
from kdtrain.errors import UsageError
from kdtrain.models.head import layer_widths, split
from kdtrain.models.loading import checkpoint_activations
from kdtrain.objective.batch import Batch
from kdtrain.objective.hidden import plan_hidden_loss
from kdtrain.objective.loss import DistillationLoss
from kdtrain.objective.targets import DenseTargets
from kdtrain.precision.compiled import compiled_whole
from kdtrain.teaching.local import LocalTeacher
from kdtrain.testing import tiny_model
from kdtrain.training.student import Student

VOCABULARY, SEQ_LEN = 300, 8


def made(student, kind="mse", compile=False, **objective):
    """Make a step of `student` towards a teacher of another width and depth, and four sequences with uneven masks."""
    teacher = split(tiny_model("llama", VOCABULARY, seed=1, hidden_size=48, num_hidden_layers=3).eval())
    config = ObjectiveConfig(hidden_loss=kind, **objective)
    plan = plan_hidden_loss(config, student, LocalTeacher.of(teacher), seed=0)
    step = Student(
        student,
        DistillationLoss(alpha=config.alpha, temperature=2.0),
        vocab_size=VOCABULARY,
        hidden_loss=plan,
        hidden_weight=config.hidden_weight,
        layers=plan.student_layers,
    ).train()
    if compile:
        # a back end that compiles nothing is enough to show that the graph is whole
        step.backbone = compiled_whole(step.backbone, backend="aot_eager", fullgraph=True)
    return step, batch_of(teacher, plan)


def batch_of(teacher, plan, size=4):
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (size, SEQ_LEN + 1), generator=g)
    mask = torch.rand(size, SEQ_LEN, generator=g) < torch.tensor([[0.9], [0.2], [0.0], [0.6]])
    with torch.no_grad():
        hidden, states = teacher(tokens[:, :-1], None, plan.teacher_layers)
        targets = DenseTargets.from_logits(teacher.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
    states = tuple(each.flatten(0, 1) for each in states)
    return Batch(tokens, mask, torch.zeros(size, SEQ_LEN, dtype=torch.int64), targets, states)


def part(batch, rows):
    flat = slice(rows.start * SEQ_LEN, rows.stop * SEQ_LEN)
    states = tuple(each[flat] for each in batch.states)
    return Batch(batch.tokens[rows], batch.loss_mask[rows], batch.segments[rows], batch.targets[flat], states)


def gradients(step, batches, normalizer):
    """Add up the gradient of all parameters over micro-batches, and the hidden-state loss."""
    step.zero_grad()
    total = 0.0
    for batch in batches:
        output = step(batch, normalizer)
        output.loss.backward()
        total += output.hidden.item()
    return {name: each.grad.clone() for name, each in step.named_parameters()}, total


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_the_gradient_does_not_depend_on_how_a_step_is_cut(kind):
    step, batch = made(split(tiny_model("llama", VOCABULARY, seed=3)), kind)
    count = float(batch.loss_mask.sum())
    whole, value = gradients(step, [batch], count)
    assert {name for name in whole if "projections" in name} == {
        "hidden_loss.projections.0",
        "hidden_loss.projections.1",
    }
    for size in (1, 2):
        cuts = [part(batch, slice(start, start + size)) for start in range(0, 4, size)]
        cut, same = gradients(step, cuts, count)
        assert same == pytest.approx(value, rel=1e-6)
        for name, each in whole.items():
            assert (cut[name] - each).norm() <= 2e-6 * each.norm() + 1e-9, name


def test_a_compiled_backbone_that_recomputes_gives_the_same_gradients():
    expected = None
    for compile in (False, True):
        model = tiny_model("gemma2", VOCABULARY, seed=3)
        if compile:
            checkpoint_activations(model)
        step, batch = made(split(model), compile=compile)
        found, _ = gradients(step, [batch], 10.0)
        expected = found if expected is None else expected
        for name, each in expected.items():
            torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", ["llama", "gpt2", "gemma2", "bloom", "falcon_h1"])
def test_the_last_layer_is_what_the_output_head_sees_and_the_first_the_embedding(shape):
    pieces = split(tiny_model(shape, VOCABULARY).eval())
    tokens = torch.randint(VOCABULARY, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    assert layer_widths(pieces) == [32, 32, 32]
    hidden, (embedding, middle, last) = pieces(tokens, None, (0, 1, 2))
    assert torch.equal(hidden, pieces(tokens)) and torch.equal(hidden, last)
    assert not torch.equal(middle, last)
    if shape == "llama":
        assert torch.equal(embedding, pieces.model.get_input_embeddings()(tokens))


def test_the_head_of_a_model_that_is_not_split_takes_part_too():
    model = tiny_model("llama", VOCABULARY, seed=3)
    student = split(model)
    student.fused = False
    step, batch = made(student)
    found, _ = gradients(step, [batch], 10.0)
    assert all(each.abs().max() > 0 for name, each in found.items() if "projections" in name)


def test_a_model_that_hides_its_layers_is_refused(monkeypatch):
    student = split(tiny_model("llama", VOCABULARY))
    monkeypatch.setattr(student, "_output", lambda *asked, **more: object())
    with pytest.raises(UsageError, match="does not return the outputs of its layers"):
        layer_widths(student)
