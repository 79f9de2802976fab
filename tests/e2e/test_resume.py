"""A run that is killed, stopped or damaged resumes as if nothing had happened: the same bits, each step once."""

import json
import shutil

import pytest

from kdtrain.checkpoint.store import Store

LEARNED = ("--temperature-mode", "adversarial", "--alpha", 0.9)
RUNS = {
    "fixed": ("--student", "student.toml", "--lr-schedule", "constant", "--warmup-steps", 0),
    "learnable": ("--student", "dropout.toml", "--micro-batch-size", 2, *LEARNED),
}
STEPS = 9
SHARD = "shard-00001-00001.safetensors"


def start(bench, kind, out, *more, fault=None, steps=STEPS, ranks=1):
    # 40 sequences in steps of 6: the second epoch begins inside step 7
    argv = ("distill", "--cache", "cache", *RUNS[kind], "--out", out, "--steps", steps, "--batch-size", 6)
    every = ("--checkpoint-freq", 2, "--eval-freq", 3, "--lr", 1e-2)
    return bench.launch(ranks, *argv, *bench.eager, *every, *more, fault=fault)[0]


@pytest.fixture(scope="module")
def uninterrupted(bench, cached):
    """Make the runs that nothing interrupts, by kind."""
    for kind in RUNS:
        start(bench, kind, f"whole-{kind}").ok()
    return {kind: f"whole-{kind}" for kind in RUNS}


def test_the_uninterrupted_runs_trained_and_are_not_trivial(bench, uninterrupted):
    temperatures = [line["T"] for line in bench.metrics(uninterrupted["learnable"])]
    assert len(set(temperatures)) > 2
    for whole in uninterrupted.values():
        assert bench.state(whole)["progress"]["step"] == STEPS
        assert any(name.endswith("exp_avg") for name in bench.tensors(whole))
        assert [line["step"] for line in bench.metrics(whole)] == list(range(1, STEPS + 1))
        assert [line["step"] for line in bench.lines(whole) if "loss" not in line] == [0, 3, 6, 9]


@pytest.mark.parametrize(
    "kind, faults",
    [
        ("fixed", ("checkpoint.before-rename:kill:1", "train.after-step:kill:5", "checkpoint.after-rename:kill:2")),
        ("learnable", ("train.after-micro-batch:kill:8", "train.after-micro-batch:term:11")),
    ],
    ids=["from-before-the-first-checkpoint", "learnable-accumulated"],
)
def test_a_run_interrupted_again_and_again_ends_with_the_same_bits(bench, uninterrupted, kind, faults):
    run = "-".join([kind, *(fault.split(":")[0] for fault in faults)])
    for fault in faults:
        done = start(bench, kind, run, fault=fault)
        if ":kill:" in fault:
            assert done.code == -9
            assert not (bench.root / run / "student").exists()
        else:
            assert "stopped by SIGTERM after step" in done.ok().stderr
            assert "resumes from there" in done.stderr
    start(bench, kind, run).ok()
    bench.assert_same(run, uninterrupted[kind])
    exported = [(bench.root / each / "student/model.safetensors").read_bytes() for each in (run, uninterrupted[kind])]
    assert exported[0] == exported[1]


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(bench, uninterrupted):
    whole = uninterrupted["fixed"]
    shutil.copytree(bench.root / whole, bench.root / "damaged", symlinks=True)
    path = bench.newest("damaged") / SHARD
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    refused = bench.run("verify", "damaged", "--json")
    assert refused.code == 1
    assert json.loads(refused.stdout)["problems"] == [f"step-00000009: {SHARD} does not match its SHA-256"]
    done = start(bench, "fixed", "damaged").ok()
    assert f"step-00000009 is damaged and skipped: {SHARD} does not match its SHA-256" in done.stderr
    assert "resuming from damaged/checkpoints/step-00000008" in done.stderr
    bench.assert_same("damaged", whole)


def test_more_steps_continue_a_finished_run_and_its_seconds_and_tokens_are_those_of_all_its_steps(bench, uninterrupted):
    start(bench, "fixed", "longer", steps=5).ok()
    lines = [line | ({"tok/s_last": 1.0} if "tok/s_last" in line else {}) for line in bench.lines("longer")]
    (bench.root / "longer/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = start(bench, "fixed", "longer", "--json")
    assert done.json["step"] == STEPS
    counts = [line["tokens"] for line in bench.metrics("longer")]
    assert done.json["tokens"] == sum(counts) and sum(counts[:5]) < done.json["seconds"] < sum(counts[:5]) + 60
    assert done.json["tokens_per_second"] == pytest.approx(sum(counts) / done.json["seconds"], rel=0.01)
    bench.assert_same("longer", uninterrupted["fixed"], validations=False)


# 1 rank or 2, the folder as it is typed, the checkpoint as it is typed, and the step that it means
SPELLINGS = {
    "latest": (1, "{run}", "latest", 6),
    "latest of a link": (1, "{run}-link", "latest", 6),
    "best": (1, "{run}", "best", 4),
    "a name": (1, "{root}/{run}", "step-00000000", 0),
    "a path": (1, "{run}", "corpus/../{run}/checkpoints/step-00000004", 4),
    "an absolute path": (1, "{run}", "{root}/{run}/checkpoints/step-00000004", 4),
    "a link to a checkpoint": (1, "{run}-link", "{run}-mine", 2),
    "best in 2 ranks": (2, "corpus/../{run}", "best", 4),
}


@pytest.fixture(scope="module")
def finished(bench, cached):
    """Finish a run of 6 steps with a checkpoint at every second, whose best is that of step 4."""
    start(bench, "fixed", "finished", "--eval-freq", 2, steps=6).ok()
    Store(bench.root / "finished/checkpoints").link("best", "step-00000004")
    return bench.root / "finished"


@pytest.mark.parametrize("ranks, out, wanted, step", SPELLINGS.values(), ids=SPELLINGS)
def test_a_resume_loses_no_checkpoint_however_its_path_is_spelled(bench, finished, ranks, out, wanted, step):
    run = f"spelled-{ranks}-{out}-{wanted}".translate(str.maketrans("/{}.", "----"))
    folder = bench.root / run / "checkpoints"
    shutil.copytree(finished, bench.root / run, symlinks=True)
    (bench.root / f"{run}-link").symlink_to(run)
    (bench.root / f"{run}-mine").symlink_to(f"{run}/checkpoints/step-00000002")
    before = contents(folder)
    out, wanted = (each.format(run=run, root=bench.root) for each in (out, wanted))

    arguments = ("--eval-freq", 2, "--resume", wanted)
    done = start(bench, "fixed", out, *arguments, "--json", steps=8, ranks=ranks)
    after = contents(folder)
    later = {f"step-{each:08d}" for each in (2, 4, 6) if each > step}
    lost = [name for name in before if after.get(f"{name}.old-1" if name in later else name) != before[name]]
    assert (lost, set(after) - set(before) - {"epoch-0001", "step-00000008"}) == (
        [],
        {f"{name}.old-1" for name in later},
    )

    first = json.loads((finished / "result.json").read_text())["first_validation_loss"]
    assert (done.json["step"], done.json["first_validation_loss"]) == (8, first)
    assert (folder / "best").resolve().name == f"step-{done.json['best_step']:08d}"
    assert done.json["best_validation_loss"] == min(
        line["validation/loss"] for line in bench.lines(run) if "validation/loss" in line
    )


def contents(folder):
    """Read the bytes of each checkpoint in a folder, by its name."""
    checkpoints = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    return {path.name: {file.name: file.read_bytes() for file in path.iterdir()} for path in checkpoints}


def test_a_run_moved_aside_by_overwrite_is_kept_and_a_new_one_begins(bench, uninterrupted):
    whole = uninterrupted["fixed"]
    shutil.copytree(bench.root / whole, bench.root / "again", symlinks=True)
    start(bench, "fixed", "again", "--resume", "never", "--overwrite", steps=1).ok()
    assert bench.newest("again").name == "step-00000001"
    assert bench.newest("again.old-1").name == bench.newest(whole).name
