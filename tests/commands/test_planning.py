"""The memory of a run and of a cache is planned, and refused where it is too much, before a weight is loaded."""

import time

import pytest
import torch

from kdtrain import cli, ranks
from kdtrain.cache.format.manifest import read_manifest
from kdtrain.errors import UsageError
from kdtrain.models.spec import ModelSpec
from kdtrain.parallel import footprint, memory_plan
from kdtrain.parallel.memory_plan import USABLE

STUDENT = ("--student", "student.toml")
TENSOR = ("--batch-size", 4, "--device-memory", 8)


def job(config):
    """Return the sizes of the run of a cache in fp32."""
    cached = read_manifest(*config.cache).settings
    return memory_plan.job_of(
        config, "fp32", torch.device("cpu"), ModelSpec.read(config.student), cached.seq_len, cached.vocab_size
    )


@pytest.fixture
def weightless(workbench):
    """Hide the weights in the teacher's folder: loading them fails."""
    weights = workbench.root / "teacher/model.safetensors"
    aside = weights.rename(weights.with_suffix(".aside"))
    yield workbench
    aside.rename(weights)


def test_a_run_that_does_not_fit_is_refused_before_anything_is_loaded_or_written(weightless):
    before = weightless.everything()
    options = ("--teacher", "teacher", *weightless.text, *STUDENT, *weightless.plain, "--out", "large")
    for more in ((), ("--dry-run",)):
        code, _, err = weightless.call("distill", *options, "--device-memory", 0.001, *more)
        *_, line = err.splitlines()
        assert code == 2 and " MiB on the device" in line and "1.0 MiB are free" in line and "Traceback" not in err
    assert weightless.everything() == before


def test_a_teacher_that_does_not_fit_is_not_cached(weightless):
    options = ("--teacher", "teacher", *weightless.text, "--out", "no-cache", "--device-memory", 0.001)
    code, _, err = weightless.call("cache-teacher", *options)
    assert code == 2 and "the teacher teacher needs" in err.splitlines()[-1]
    assert not (weightless.root / "no-cache").exists()


def test_parts_of_a_teacher_need_several_processes(workbench):
    options = ("--teacher", "teacher", *workbench.text, "--out", "no-cache", "--teacher-parallel", "fsdp")
    code, _, err = workbench.call("cache-teacher", *options)
    assert code == 2 and "start the command with torchrun" in err


def test_a_dry_run_shows_the_plan(workbench):
    shown = workbench.json("distill", "--cache", "cache", *STUDENT, *workbench.plain, "--out", "dry", "--dry-run")
    plan = shown["parallel"]
    assert (plan["ranks"], plan["student"], plan["teacher"]) == (1, "single", "none")
    assert 0 < plan["GiB a rank"] < plan["GiB free"]
    assert plan["most at"] in ("head", "backward", "save")


def test_a_run_of_more_ranks_is_planned_from_shapes_and_writes_nothing(weightless):
    before, common = weightless.everything(), ("distill", *STUDENT, *weightless.plain, "--out", "dry", "--dry-run")
    plans = {
        ranks: weightless.json(*common, "--cache", "cache", "--world-size", 4, "--tensor-parallel", ranks, *TENSOR)
        for ranks in (1, 2)
    }
    assert [each["parallel"]["data ranks"] for each in plans.values()] == [4, 2]
    assert "cut over 2 tensor ranks, the same on each data rank" in plans[2]["plan"]
    code, _, err = weightless.call(*common, "--cache", "cache", "--world-size", 3, "--tensor-parallel", 2)
    assert code == 2 and "--tensor-parallel 2 does not divide --world-size 3" in err
    assert weightless.everything() == before


def test_the_recipe_of_7_billion_is_planned_in_seconds_and_shows_what_stays_and_what_else_fits(workbench):
    common = ("distill", "--dry-run", "--world-size", 8, "--student", "qwen2-7b", "--data", "stdlib", "--alpha", 0)
    shape = ("--seq-len", 32768, "--batch-size", 128, "--micro-batch-size", 1, "--activation-checkpointing")
    options = (*common, *shape, "--precision", "bf16", "--device-memory", 80, "--out", "dry")
    started = time.process_time()
    cut = workbench.json(*options, "--tensor-parallel", 4)["parallel"]
    assert time.process_time() - started < 30
    assert (cut["data ranks"], cut["student"], cut["tensor ranks"]) == (2, "ddp", 4)
    assert round(cut["GiB a rank"]) == 33, "as in docs/multi-node.md, for a card where there is none"
    on_cpu = workbench.json(*options, "--tensor-parallel", 4, "--device", "cpu")["parallel"]
    assert "copy for the save" in on_cpu["of it"]
    assert cut["of it, whatever the tensor ranks"] == {"output head": 0.438}
    whole = workbench.json(*options)["parallel"]
    assert (whole["student"], round(whole["GiB a rank"])) == ("fsdp", 63)
    assert whole["proposed"].startswith("--tensor-parallel 2 (no rank has room for a whole copy; the ranks of a node")


def test_a_model_that_cannot_be_measured_is_planned_without_numbers(workbench, monkeypatch, caplog):
    def needs_numbers(*_, **__):
        raise RuntimeError("a tensor\nwithout numbers")

    monkeypatch.setattr(footprint, "model_footprint", needs_numbers)
    config = cli.parse("distill", ["--cache", "cache", *STUDENT, "--out", "x"])
    assert job(config) is None and memory_plan.plan_run(config, None, free=1e6).needs == {}


@pytest.mark.parametrize("option", [("--parallel", "fsdp"), ("--shard-size", "1"), ()])
def test_a_plan_that_needs_several_processes_is_refused_in_one(workbench, caplog, option):
    caplog.set_level("INFO", "kdtrain")
    config = cli.parse("distill", ["--cache", "cache", *STUDENT, "--out", "x", *option])
    assert memory_plan.plan_run(config, job(config), free=None).student == "single"
    assert ("are for torchrun" in caplog.text) == bool(option)


def test_the_ranks_of_a_node_share_what_its_cpu_has_with_or_without_a_limit(monkeypatch):
    alone = ranks.free_memory(torch.device("cpu"), None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = ranks.free_memory(torch.device("cpu"), None)
    assert alone and shared and 3 < alone / shared < 5
    assert ranks.free_memory(torch.device("cpu"), 2.0) == 2 * 2**30
    unlimited = {"meminfo": "MemAvailable: 4 kB", "memory.max": "max\n", "memory.current": "1\n"}
    monkeypatch.setattr(ranks.Path, "read_text", lambda path: unlimited[path.name])
    assert ranks.free_memory(torch.device("cpu"), None) == 1024


def test_the_automatic_micro_batch_is_the_largest_that_the_plan_finds_room_for(workbench):
    words = ["--cache", "cache", *STUDENT, "--out", "x", "--batch-size", "12", "--micro-batch-size"]
    needs = {}
    for micro in (12, 6, 3):
        given = cli.parse("distill", [*words, str(micro)])
        needs[micro] = memory_plan.plan_run(given, job(given), None).total
    assert needs[12] > needs[6] > needs[3]
    config = cli.parse("distill", [*words, "auto"])
    for micro in (12, 6, 3):
        assert memory_plan.fitting_micro_batch(config, 12, job(config), free=needs[micro] / USABLE * 1.001) == micro
    assert memory_plan.fitting_micro_batch(config, 12, job(config), free=None) == 12
    free = needs[3] / USABLE * 0.99
    assert memory_plan.fitting_micro_batch(config, 12, job(config), free) == 3
    with pytest.raises(UsageError, match="are free"):
        memory_plan.plan_run(given, job(given), free)


def test_a_run_takes_the_automatic_micro_batch_and_says_so_in_its_result(workbench):
    argv = ("distill", "--cache", "cache", *STUDENT, *workbench.plain, "--out", "auto", "--steps", 1)
    assert workbench.json(*argv, "--micro-batch-size", "auto")["micro_batch_size"] == 8
    assert 'micro_batch_size = "auto"' in (workbench.root / "auto/config.toml").read_text()
