"""Where a learned temperature ends on the real logits of the teacher that ships, from any start."""

import dataclasses
import math
import sysconfig
from pathlib import Path

import pytest
import torch
from objective_reference import OutputHead, dense, sparse

from kdtrain.models.head import split
from kdtrain.models.loading import load_student, load_teacher
from kdtrain.models.spec import read_spec
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.temperature import build_temperature

ROOT = Path(__file__).resolve().parents[2]
STARTS = (0.7, 1.1, 1.9, 3.8)
LOW, HIGH = 2 / 3, 4.0
SEQUENCES, LENGTH = 4, 64


@dataclasses.dataclass
class Real:
    """Hidden states and head of a student after a few steps, and its teacher's targets, of real text."""

    hidden: torch.Tensor
    head: OutputHead
    labels: torch.Tensor
    targets: dict

    def loss(self, kind, T):
        mask = torch.ones_like(self.labels, dtype=torch.bool)
        return distillation_loss(
            self.hidden, self.head, self.labels, mask, self.targets[kind], temperature=T, alpha=1.0,
            vocab_size=2048, normalizer=float(len(mask)),
        ).loss  # fmt: skip


@pytest.fixture(scope="module")
def real():
    teacher_spec = read_spec(str(ROOT / "teachers/stdlib-5m.toml"))
    teacher = split(load_teacher(teacher_spec, "cpu").float())
    student = split(
        load_student(read_spec(str(ROOT / "students/stdlib-1m.toml")), vocab_size=2048, seed=0, device="cpu")
    )
    text = "".join((Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text() for name in ("bisect", "heapq"))
    ids = torch.tensor(load_tokenizer(teacher_spec)(text)["input_ids"])
    rows = ids[: SEQUENCES * (LENGTH + 1)].reshape(SEQUENCES, LENGTH + 1)
    with torch.no_grad():
        energies = torch.log_softmax(teacher.logits(rows[:, :-1]), -1)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    for _ in range(12):
        log_q = torch.log_softmax(student.logits(rows[:, :-1]), -1)
        optimizer.zero_grad()
        torch.nn.functional.kl_div(log_q, energies, log_target=True, reduction="sum").div(rows.numel()).backward()
        optimizer.step()
    student.eval()
    with torch.no_grad():
        hidden = student(rows[:, :-1]).flatten(0, 1)
    energies, labels = energies.flatten(0, 1).double(), rows[:, 1:].flatten()
    targets = {
        "dense": dense(energies, labels, torch.float32),
        "sparse": sparse(energies, labels, top_k=12, dtype=torch.float32),
    }
    return Real(hidden, OutputHead(student.head.weight.detach()), labels, targets)


def ends(real, kind, mode, steps=70):
    """The learned T and the bound it sits on, by start."""
    mask = torch.ones_like(real.labels, dtype=torch.bool)
    found = {}
    for start in STARTS:
        temperature = build_temperature(mode, start=start, minimum=LOW, maximum=HIGH, total_steps=steps)
        optimizer = torch.optim.Adam(temperature.parameters(), lr=0.25)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in range(steps):
            temperature.set_step(step)
            own = temperature.auxiliary_loss(real.targets[kind], mask, float(len(mask)))
            optimizer.zero_grad()
            (real.loss(kind, temperature.value()) if own is None else own).backward()
            optimizer.step()
            rates.step()
        found[start] = temperature.value().item(), temperature.at_bound()
    return found


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_adversarial_ends_at_the_top_of_the_hump_from_any_start(real, kind):
    grid = torch.linspace(math.log(LOW), math.log(HIGH), 60).exp().tolist()
    values = [real.loss(kind, T).item() for T in grid]
    top = grid[values.index(max(values))]
    assert 1.1 < top < 2.5
    for value, bound in ends(real, kind, "adversarial").values():
        assert bound is None
        assert value == pytest.approx(top, rel=0.06)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_likelihood_ends_near_1_for_a_teacher_of_this_text_from_any_start(real, kind):
    found = ends(real, kind, "likelihood", steps=250)
    assert all(bound is None for _, bound in found.values())
    values = [value for value, _ in found.values()]
    assert max(values) / min(values) < 1.02
    assert 0.75 < values[0] < 1.35


def test_minimize_ends_on_the_bound_that_its_start_decides_and_reports_it(real):
    found = ends(real, "sparse", "minimize", steps=150)
    assert [bound for _, bound in found.values()] == ["minimum", "minimum", "maximum", "maximum"]
