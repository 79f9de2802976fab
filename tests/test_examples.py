"""The examples, run as a user runs them; those that train as `kdtrain distill` does take its steps.

One is started as a process of its own, the others are forks of one that has imported everything, with the environment
that torchrun gives where there are several ranks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdtrain.testing import tiny_model

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
TEACHER = ("--teacher", str(ROOT / "teachers" / "stdlib-5m.toml"), "--data", "stdlib")


def alone(*command):
    """Run a Python command to its end, in a process of its own."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def run(server):
    """Return a function that runs a Python command and returns what it prints on rank 0."""

    def run(*command, **options):
        first, *others = server.run(*command, **options)
        assert not any(each.returncode for each in (first, *others)), first.stderr[-2000:]
        return first.stdout

    return run


def losses(printed):
    """Read the numbers of the last line that begins with `losses`."""
    line = [each for each in printed.splitlines() if each.startswith("losses ")][-1]
    return [float(word) for word in line.split()[1:]]


@pytest.fixture(scope="module")
def material(run, tmp_path_factory):
    """Make a cache of 64 sequences and a model with a tied head, and the losses of 4 steps of `kdtrain distill`."""
    folder = tmp_path_factory.mktemp("examples")
    sizes = ("--seq-len", "32", "--num-sequences", "64", "--top-k", "12", "--precision", "fp32")
    run("-m", "kdtrain", "cache-teacher", *TEACHER, "--out", folder / "cache", *sizes)
    tiny_model("llama", 2048, seed=3).save_pretrained(folder / "model")
    fixed = ("--lr", "1e-3", "--lr-schedule", "constant", "--warmup-steps", "0", "--weight-decay", "0")
    plain = ("--precision", "fp32", "--no-compile", "--eval-batches", "1", "--steps", "4", "--batch-size", "8")
    where = ("--cache", folder / "cache", "--student", folder / "model", "--alpha", "0.9", "--out", folder / "run")
    run("-m", "kdtrain", "distill", *where, *fixed, *plain)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return folder / "cache", folder / "model", [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_in_the_table(example):
    assert len(example.read_text().splitlines()) < 60
    assert f"`{example.name}`" in (EXAMPLES / "README.md").read_text()


def test_a_plain_loop_lowers_the_loss_and_learns_a_temperature(run, material):
    cache, model, _ = material
    printed = run(EXAMPLES / "plain_loop.py", cache, model, 24, CUDA_VISIBLE_DEVICES="")
    values = [line.split() for line in printed.splitlines() if line.startswith("loss ")]
    assert float(values[-1][1]) < float(values[0][1])
    assert values[-1][5] != values[0][5]


def test_a_student_learns_from_what_it_writes_in_a_loop_of_ones_own(run, material):
    folder = ROOT / "teachers" / "stdlib-5m"
    printed = run(EXAMPLES / "on_policy_loop.py", folder, material[1], 12, CUDA_VISIBLE_DEVICES="")
    values = [float(line.split()[3]) for line in printed.splitlines() if line.startswith("round ")]
    assert len(values) == 24 and sum(values[-6:]) < sum(values[:6])


@pytest.mark.parametrize("world", [1, 2])
def test_the_trainer_of_transformers_takes_the_steps_of_the_command_on_any_number_of_ranks(run, material, world):
    cache, model, expected = material
    found = losses(run(EXAMPLES / "transformers_trainer.py", cache, model, 4, world=world))
    assert found == pytest.approx(expected, abs=1e-6 * max(expected))


def test_accelerate_with_fsdp2_takes_the_steps_of_one_process(run, material, tmp_path):
    cache, model, _ = material
    script = tmp_path / "on_cpus.py"
    script.write_text(ON_CPUS)
    example = EXAMPLES / "accelerate_fsdp2.py"
    sharded = run(script, example, cache, model, 4, world=2, ACCELERATE_TORCH_DEVICE="cpu")
    assert losses(sharded) == pytest.approx(losses(run("-c", ONE_PROCESS, cache, model)), rel=1e-5)


# accelerate itself leaves FSDP out on CPUs, though gloo and FSDP2 can do it
ON_CPUS = """
import runpy, sys
from accelerate.state import PartialState
from accelerate.utils import DistributedType
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_accelerate_without_gpus_is_refused_by_its_example(server, material):
    cache, model, _ = material
    (done,) = server.run(EXAMPLES / "accelerate_fsdp2.py", cache, model, 1, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "several GPUs" in done.stderr


ONE_PROCESS = """
import sys, torch
from transformers import AutoModelForCausalLM
import kdtrain as kd
student = kd.Student(AutoModelForCausalLM.from_pretrained(sys.argv[2]), kd.DistillationLoss(alpha=0.9)).train()
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
data, losses = kd.Cache(sys.argv[1])["train"], []
for step in range(4):
    output = student(**kd.collate(data.__getitems__(range(8 * step, 8 * step + 8))))
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(output.loss.item())
print("losses", *losses)
"""


def test_a_search_with_optuna_finds_a_lower_loss_and_goes_on_where_it_was(run, material, tmp_path):
    pytest.importorskip("optuna")
    cache, model, _ = material

    def search(trials):
        return run(EXAMPLES / "search_with_optuna.py", cache, model, tmp_path / "study", trials, 2)

    assert "best " in search(1) and len([*(tmp_path / "study").glob("trial-*")]) == 1
    printed = search(3)
    assert len([*(tmp_path / "study").glob("trial-*")]) == 3
    results = [json.loads(path.read_text()) for path in (tmp_path / "study").glob("trial-*/result.json")]
    assert f"best {min(each['best_validation_loss'] for each in results):.4f}" in printed
    assert len({each["best_validation_loss"] for each in results}) == 3  # a study that resumes draws other values


def test_a_loop_that_switches_its_precision_resumes_with_the_same_losses(run, material, tmp_path):
    cache, model, _ = material

    def lines(folder, steps):
        printed = run(EXAMPLES / "precision_and_checkpoints.py", cache, model, tmp_path / folder, steps)
        return [line for line in printed.splitlines() if line.startswith("step ")]

    whole = lines("whole", 12)
    cut = [*lines("cut", 5), *lines("cut", 12)]
    assert cut == whole and len(whole) == 12
    assert {line.split()[-1] for line in whole} == {"mxfp4", "bf16"}


def test_an_example_without_its_words_shows_its_usage(tmp_path):
    done = alone(EXAMPLES / "precision_and_checkpoints.py", "cache", "model")
    assert done.returncode == 1 and done.stderr.startswith("usage: ") and "Traceback" not in done.stderr


def test_lm_eval_reads_an_export_and_agrees_with_transformers(tmp_path):
    pytest.importorskip("lm_eval")
    import torch
    from transformers import AutoModelForCausalLM

    from kdtrain.testing import tiny_tokenizer, write_model_folder

    texts = ["held out text", "another one of it"]
    folder = write_model_folder(tmp_path / "model", tiny_model("llama", 300, seed=3), tiny_tokenizer(300))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    done = alone(EXAMPLES / "evaluate_with_lm_eval.py", folder, tmp_path / "rows.jsonl")
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(line.split() for line in done.stdout.splitlines() if line.startswith("bits_per_byte"))
    model, bits = AutoModelForCausalLM.from_pretrained(folder).eval(), 0.0
    for text in texts:
        tokens = torch.tensor([[299, *tiny_tokenizer(300)(text).input_ids]])
        with torch.no_grad():
            bits -= model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None]).sum().item()
    assert float(found["bits_per_byte"]) == pytest.approx(bits / 0.6931472 / sum(map(len, texts)), rel=1e-3)
