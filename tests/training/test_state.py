"""The state of a run: complete, restored into the same parameters, and seeded by the step alone."""

import random

import numpy as np
import pytest
import torch

from kdtrain.config.sections import ObjectiveConfig, OptimizerConfig
from kdtrain.errors import RunError
from kdtrain.models.head import split
from kdtrain.objective.loss import DistillationLoss
from kdtrain.objective.temperature import build_temperature
from kdtrain.testing import tiny_model
from kdtrain.training.optimizers import make_optimizer
from kdtrain.training.state import TrainState, seed_everything
from kdtrain.training.student import Student


def made(seed=0, shape="llama", **config):
    student = split(tiny_model(shape, 300, seed=seed, **config))
    temperature = build_temperature("likelihood", start=2.0, minimum=1.0, maximum=4.0)
    student = Student(student, DistillationLoss(temperature=temperature))
    return TrainState(student, make_optimizer(student, OptimizerConfig(lr=0.1), ObjectiveConfig().temperature_lr))


def stepped(state, seed):
    """Take an optimizer step of `state` on random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.progress.step += 1
    return state


@pytest.mark.parametrize("shape", ["llama", "gpt2", "qwen3"])
def test_a_restored_state_resumes_bitwise(shape):
    whole = stepped(stepped(made(1, shape), seed=1), seed=2)
    half = stepped(made(1, shape), seed=1)
    saved = {name: tensor.clone() for name, tensor in half.tensors().items()}
    other = made(2, shape)
    parameters = list(other.student.parameters())
    other.load(saved, half.numbers())
    assert all(a is b for a, b in zip(parameters, other.student.parameters(), strict=True))
    stepped(other, seed=2)
    assert other.progress == whole.progress
    ours, theirs = other.tensors(), whole.tensors()
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_the_state_holds_weights_moments_counters_and_the_temperature():
    names = set(stepped(made(), seed=0).tensors())
    assert "temperature.theta" in names
    assert {"optimizer.temperature.theta.exp_avg", "optimizer.temperature.theta.step"} <= names
    weights = {name.removeprefix("student.") for name in names if name.startswith("student.")}
    moments = {name for name in names if name.startswith("optimizer.student.") and name.endswith("exp_avg_sq")}
    assert len(moments) == len(weights)


def test_tied_weights_are_saved_once_and_stay_tied():
    state = made()
    assert len([name for name in state.tensors() if "embed_tokens" in name or "lm_head" in name]) == 1
    other = made(5)
    other.load(state.tensors(), state.numbers())
    model = other.student.model.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(model.get_output_embeddings().weight, state.student.model.model.get_output_embeddings().weight)


def test_a_checkpoint_of_another_student_is_refused_by_the_name_of_what_differs():
    saved = made().tensors()
    with pytest.raises(RunError, match=r"layers\.2\."):
        made(num_hidden_layers=3).load(saved, made().numbers())
    with pytest.raises(RunError, match=r"shape \[64, 32\], the student's \[48, 32\]"):
        made(intermediate_size=48).load(saved, made().numbers())


NAME = "student.model.model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("exp_avg", torch.zeros(3), r"exp_avg has shape \[3\]"),
        ("exp_avg_sq", torch.zeros(32, 64), r"exp_avg_sq has shape"),
        ("exp_avg", torch.zeros(64, 32, dtype=torch.int64), "exp_avg has type torch.int64"),
        ("exp_avg", None, r"has \['exp_avg_sq', 'step'\]"),
        ("more", torch.zeros(64, 32), "more"),
        ("step", torch.zeros(5), r"step has shape \[5\]"),
        ("step", torch.zeros((), dtype=torch.float64), "step has type torch.float64"),
    ],
)
def test_moments_that_adamw_would_crash_on_are_refused_by_name(key, value, says):
    state = stepped(made(), seed=0)
    tensors = state.tensors()
    assert tensors[f"optimizer.{NAME}.exp_avg"].shape == (64, 32)
    tensors[f"optimizer.{NAME}.{key}"] = value
    with pytest.raises(RunError, match=says) as error:
        made().load({name: each for name, each in tensors.items() if each is not None}, state.numbers())
    assert NAME in str(error.value)


def test_weights_of_another_type_are_refused_by_name():
    state = made()
    tensors = {name: each.to(torch.complex64) if name == NAME else each for name, each in state.tensors().items()}
    with pytest.raises(RunError, match=r"up_proj\.weight has type torch\.complex64, the student's torch.float32"):
        made().load(tensors, state.numbers())


def test_progress_that_this_version_does_not_know_is_refused_by_name():
    state = made()
    numbers = state.numbers()
    numbers["progress"]["more"] = 1
    with pytest.raises(RunError, match="progress has 'more'"):
        made().load(state.tensors(), numbers)


def test_progress_of_a_version_that_counted_no_bytes_loads_without_them():
    state = stepped(made(), seed=0)
    numbers = state.numbers()
    del numbers["progress"]["bytes_per_token"]
    other = made(1)
    other.load(state.tensors(), numbers)
    assert other.progress == state.progress and other.progress.bytes_per_token is None


def test_only_matrices_decay_and_the_temperature_has_a_rate_of_its_own():
    state = made(shape="qwen3")
    named = dict(state.student.named_parameters())
    group_of = {id(p): group for group in state.optimizer.param_groups for p in group["params"]}
    assert len(group_of) == len(named)
    for name, parameter in named.items():
        group = group_of[id(parameter)]
        decays = parameter.ndim == 2 and "embed" not in name
        assert group["weight_decay"] == (0.1 if decays else 0.0), name
        assert group["peak"] == (pytest.approx(0.1) if name == "loss.temperature.theta" else 1.0), name


def test_a_tied_head_is_an_embedding_and_does_not_decay():
    state = made()
    tied = state.student.model.model.get_output_embeddings().weight
    group = next(g for g in state.optimizer.param_groups if any(p is tied for p in g["params"]))
    assert group["weight_decay"] == 0.0


def drawn():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_step_draws_the_same_numbers_whatever_was_drawn_before():
    seed_everything(3, 7)
    first = drawn()
    drawn()
    seed_everything(3, 7)
    assert drawn() == first
    others = []
    for seed, step in ((3, 8), (4, 7), (7, 3), (0, 0)):
        seed_everything(seed, step)
        others.append(drawn())
    assert len({first, *others}) == 5
