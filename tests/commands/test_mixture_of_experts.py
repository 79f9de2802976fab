"""`kdtrain distill` of a mixture of experts: its metrics, its lines, and the plan."""

import json

import pytest

from kdtrain.run import build
from kdtrain.testing import SHAPES


@pytest.fixture
def mixture(workbench):
    """Write the configuration of a student with experts, `mixture.toml`."""
    table = SHAPES["llama"] | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    table |= {"moe_intermediate_size": 16, "router_aux_loss_coef": 0.5}
    entries = "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    (workbench.root / "mixture.toml").write_text(f"[config]\n{entries}")
    return table


def steps_of(run):
    metrics = (run / "metrics.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, metrics) if "router" in each]


def test_a_run_of_a_mixture_has_the_routers_loss_as_a_metric_in_the_loss_and_lines_of_one_line(workbench, mixture):
    argv = ("distill", "--cache", "cache", "--student", "mixture.toml", "--steps", 4, "--log-freq", 1, "--alpha", 0.9)
    plan = workbench.json(*argv, "--out", "planned", "--dry-run", *workbench.plain)["student"]
    experts = mixture["num_hidden_layers"] * 4 * 3 * 16 * mixture["hidden_size"]
    assert plan["parameters"] - plan["active for a token"] == experts // 2
    code, _, said = workbench.call(*argv, "--out", "mixed", "--micro-batch-size", 4, *workbench.plain)
    assert code == 0, said
    lines = [line for line in said.splitlines() if " step " in line and " loss " in line]
    assert len(lines) >= 4 and all(len(line) <= 80 and "+ .5 router" in line for line in lines)
    steps = steps_of(workbench.root / "mixed")
    assert len(steps) == 4
    for each in steps:
        parts = 0.1 * each["ce"] + 0.9 * each["kd"] + 0.5 * each["router"]
        assert abs(each["loss"] - parts) < 1e-5 and each["router"] > 0.5


def test_the_routers_loss_is_beside_the_cross_entropy_of_replay(workbench, mixture):
    bare = ("distill", *workbench.text, "--num-sequences", 16, "--student", "student.toml", "--out", "bare")
    workbench.json(*bare, "--steps", 1, *workbench.plain)
    argv = ("distill", "--cache", "cache", "--cache", "bare/data", "--student", "mixture.toml", "--out", "both")
    code, _, said = workbench.call(*argv, "--steps", 2, "--log-freq", 1, "--alpha", 0.9, *workbench.plain)
    assert code == 0, said
    assert "loss = .9 kl + .1 ce + .9 ce of replay + .5 router" in " ".join(said.split())
    for each in steps_of(workbench.root / "both"):
        parts = 0.1 * each["ce"] + 0.9 * each["kd"] + 0.9 * each["ce_alone"] + 0.5 * each["router"]
        assert each["loss"] == pytest.approx(parts, abs=1e-5) and each["ce_alone"] > 0 < each["router"]


def test_a_run_that_began_without_the_routers_loss_goes_on_with_it_and_says_so(workbench, mixture, monkeypatch):
    argv = ("distill", "--cache", "cache", "--student", "mixture.toml", "--out", "before", *workbench.plain)
    with monkeypatch.context() as earlier:
        earlier.setattr(build, "router_weight", lambda model: 0.0)  # a version that did not write it
        workbench.json(*argv, "--steps", 1)
    said = "trained without the router's auxiliary loss, which is added from here on, times 0.5"
    for steps, warned in ((2, True), (3, False)):
        code, _, err = workbench.call(*argv, "--steps", steps)
        assert code == 0 and (said in " ".join(err.split())) == warned, err
    state = max((workbench.root / "before/checkpoints").glob("step-*/state.json")).read_text()
    assert json.loads(state)["student"]["router_weight"] == 0.5
