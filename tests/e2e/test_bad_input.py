"""Bad input gets one line that names what is wrong and exit code 2, a failure while running gets one and exit 1.

Nothing that was published before is touched by either.
"""

import hashlib
import json
import shutil

import pytest

from kdtrain.checkpoint.sealed import seal
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder

# short and not compiled, for the day on which one of them is not refused
SHORT = ("--no-compile", "--num-workers", 0)
DISTILL = ("distill", *SHORT, "--cache", "cache", "--student", "student.toml", "--out", "new")
TEXT = ("distill", *SHORT, "--student", "student.toml", "--out", "new", "--seq-len", 32, "--data")
TEACHER = ("cache-teacher", "--teacher", "teacher", "--out", "new-cache", "--seq-len", 32, "--num-workers", 0)
ONLINE = ("distill", *SHORT, "--teacher", "teacher", "--student", "student.toml", "--out", "new", "--data", "corpus")

# Mistakes on the command line are in golden/mistakes.txt, other specs and models in tests/models.
WORLD = {
    "spec that is nothing": ((*DISTILL, "--student", "no such"), ["no such", "org/name"]),
    "hub id without the hub": ((*DISTILL, "--student", "some/model"), ["some/model", "hub cannot be reached"]),
    "truncated config.json": ((*DISTILL, "--student", "truncated"), ["truncated", "config.json", "not valid JSON"]),
    "vocabulary too small": ((*DISTILL, "--student", "small.toml"), ["200", "300"]),
    "other tokenizer": (("evaluate", "--student", "other", "--cache", "cache"), ["another tokenizer"]),
    "other tokenizer to train": ((*DISTILL, "--student", "other"), ["another tokenizer"]),
    "edited manifest": ((*DISTILL, "--cache", "edited"), ["edited/manifest.json", "altered"]),
    "empty file": ((*TEXT, "empty.txt"), ["empty.txt", "empty"]),
    "empty folder": ((*TEXT, "empty"), ["empty", "no text"]),
    "too little text": ((*TEXT, "little.txt"), ["32 tokens", "--seq-len"]),
    "too long for the student": ((*TEXT, "corpus", "--seq-len", 129), ["--seq-len 129", "128"]),
    "too long for the teacher": ((*TEACHER, "--data", "corpus", "--seq-len", 129), ["--seq-len 129", "128"]),
    "too long online": ((*ONLINE, "--teacher", "short", "--seq-len", 32), ["--seq-len 32", "16"]),
    "head too large": ((*TEACHER, "--data", "corpus", "--top-k", 301), ["--top-k 301", "300"]),
    "temperature outside the cache": ((*DISTILL, "--temperature", 9), ["9.0", "0.667", "--temperature"]),
    "samples that are not there": (
        (*DISTILL, "--tail", "control-variate"),
        ["--tail control-variate", "--num-samples", "ghost"],
    ),
    "bounds outside the cache": (
        (*DISTILL, "--temperature-mode", "likelihood", "--temperature-max", 50),
        ["50", "--temperature-max"],
    ),
    "temperature without a top": (
        (*ONLINE, "--seq-len", 32, "--divergence", "tvd", "--temperature-mode", "adversarial"),
        ["--temperature-mode adversarial", "--divergence tvd", "grows with T"],
    ),
    "folder of something else": ((*DISTILL, "--out", "corpus"), ["corpus", "not a run"]),
    "folder of a run": ((*DISTILL, "--out", "run", "--resume", "never"), ["run", "--overwrite"]),
    "cache over another": ((*TEACHER, "--data", "corpus", "--out", "cache"), ["codec.top_k: 12 there", "--out"]),
    "cache over something else": ((*TEACHER, "--data", "corpus", "--out", "corpus"), ["corpus", "not a cache"]),
    "export of no run": (("export", "corpus", "--out", "x"), ["corpus", "not a run"]),
    "inspect of nothing": (("inspect", "corpus"), ["corpus", "neither"]),
    "odd heads": ((*DISTILL, "--student", "odd.toml"), ["cannot be run as it is configured", "tensor a (3)"]),
    "no layers": ((*DISTILL, "--student", "flat.toml"), ["num_hidden_layers = 0", "at least 1"]),
    "wider than the machine to evaluate": (
        ("evaluate", "--student", "wide.toml", "--cache", "cache"),
        ["wide: its weights take", "this machine has"],
    ),
    "code beside a model": ((*DISTILL, "--student", "code"), ["code: it has its own code", "trust_remote_code"]),
    "code beside a teacher": (
        (*TEACHER, "--data", "corpus", "--teacher", "code"),
        ["tokenizer_class = 'AutoModelForCausalLM' is not a tokenizer"],
    ),
    "code of a run": (("export", "code-run", "--out", "x"), ["code-run/checkpoints/step", "model_type 'vit'"]),
    "kernel of a run": (
        ("evaluate", "--student", "kernel-run", "--cache", "cache"),
        ["kernel-run/checkpoints/step", "attention = 'kernels-comm"],
    ),
    "template without end": (
        (*TEACHER, "--teacher", "endless", "--data", "chat.jsonl", "--messages-column", "messages"),
        ["the chat template takes more than"],
    ),
    "teacher of NaN": (
        (*TEACHER, "--data", "corpus", "--teacher", "nan-teacher"),
        ["teacher nan-teacher: model.embed_tokens.weight is non-finite"],
    ),
}


@pytest.fixture(scope="module")
def broken(bench, distilled):
    """Make everything that the table names, beside a finished cache and a finished run."""
    root = bench.root
    (root / "empty.txt").write_text("")
    (root / "little.txt").write_text("a\nb\nc\n")
    (root / "empty").mkdir()
    bench.student("small", vocab_size=200, tokenizer="teacher")
    write_model_folder(root / "other", tiny_model("llama", 301), tiny_tokenizer(301))
    write_model_folder(root / "short", tiny_model("llama", 300, max_position_embeddings=16), tiny_tokenizer(300))
    write_model_folder(root / "truncated", tiny_model("llama", 300), tiny_tokenizer(300))
    text = (root / "truncated/config.json").read_text()
    (root / "truncated/config.json").write_text(text[: len(text) // 2])
    shutil.copytree(root / "cache", root / "edited")
    manifest = json.loads((root / "edited/manifest.json").read_text())
    manifest["temperature_range"]["max"] = 100.0
    (root / "edited/manifest.json").write_text(json.dumps(manifest))
    write_hostile(bench)
    return bench


def write_hostile(bench):
    """Write specs, model folders and runs from an untrusted source; their code would write `executed`."""
    root = bench.root
    bench.student("odd", head_dim=3)
    bench.student("flat", num_hidden_layers=0)
    bench.student("wide", hidden_size=10**9, vocab_size=300)
    code = f"open({str(root / 'executed')!r}, 'w').close()\n"
    auto_map = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    for name in ("code", "endless"):
        shutil.copytree(root / "teacher", root / name)
        (root / name / "code.py").write_text(code)
    edit(root / "code/config.json", model_type="vit", auto_map=auto_map)
    edit(root / "code/tokenizer_config.json", tokenizer_class="AutoModelForCausalLM")
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for path in (root / "endless").glob("chat_template*"):
        path.unlink()
    edit(root / "endless/tokenizer_config.json", chat_template=loops)
    write_model_folder(root / "nan-teacher", spoiled(tiny_model("llama", 300)), tiny_tokenizer(300))
    for name in ("code-run", "kernel-run"):
        shutil.copytree(root / "run", root / name, symlinks=True)
    for path in (root / "code-run/checkpoints").glob("step-*"):
        reseal(path, lambda student: student["architecture"].update(model_type="vit", auto_map=auto_map))
    for path in (root / "kernel-run/checkpoints").glob("step-*"):
        reseal(path, lambda student: student.update(attention="kernels-community/x"))


def edit(path, **entries):
    """Put entries into a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def reseal(checkpoint, change):
    """Change the student in a checkpoint's state, and the digest in its manifest accordingly."""
    state = json.loads((checkpoint / "state.json").read_text())
    change(state["student"])
    text = json.dumps(state).encode()
    (checkpoint / "state.json").write_bytes(text)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.json"] = [len(text), hashlib.sha256(text).hexdigest()]
    (checkpoint / "manifest.json").write_text(seal(manifest["step"], manifest["rollbacks"], manifest["files"]))


def digests(folder):
    """Compute the SHA-256 of every file below a folder, by name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("argv, words", WORLD.values(), ids=WORLD)
def test_inputs_that_do_not_fit_together_are_one_line_and_exit_code_2(broken, argv, words):
    before = {name: digests(broken.root / name) for name in ("cache", "run", "corpus")}
    shutil.rmtree(broken.root / "new", ignore_errors=True)
    done = broken.run(*last_of_each(argv))
    assert done.code == 2, done.stderr
    message = done.refusal()
    assert [word for word in words if word not in message] == [], message
    assert done.stdout == ""
    assert {name: digests(broken.root / name) for name in before} == before
    assert not (broken.root / "new" / "checkpoints").exists()
    assert not (broken.root / "executed").exists()


def last_of_each(argv):
    """Remove a flag of the base command that is given again, with its value: a command takes one student."""
    single = ("--student", "--teacher", "--cache", "--data")
    again = [at for at, word in enumerate(argv) if word in single and word in argv[at + 1 :]]
    return [word for at, word in enumerate(argv) if at not in again and at - 1 not in again]


def test_after_a_refusal_the_right_command_runs_in_the_same_folder(broken):
    argv = ("distill", "--cache", "cache", "--out", "second-try", "--steps", 1, *broken.eager, *broken.fast)
    assert broken.run(*argv, "--student", "small.toml").code == 2
    assert broken.run(*argv, "--student", "student.toml").ok()


def test_a_full_disk_in_a_checkpoint_keeps_the_earlier_ones_and_the_run_resumes(bench, cached):
    argv = ("distill", "--cache", "cache", "--student", "student.toml", "--out", "full", "--steps", 3)
    argv += ("--checkpoint-freq", 1, "--disk-patience", 0, *bench.eager, *bench.fast)
    done = bench.run(*argv, fault="checkpoint.before-rename:enospc:3-99")
    assert done.code == 1
    message = done.refusal()
    assert "full/checkpoints/step-00000002" in message and "No space left on device" in message
    assert bench.newest("full").name == "step-00000001"
    assert bench.run("verify", "full").code == 0
    assert not list((bench.root / "full/checkpoints").glob(".*.tmp"))
    bench.run(*argv).ok()
    assert [line["step"] for line in bench.metrics("full")] == [1, 2, 3]


@pytest.mark.parametrize("point", ["cache.shard.before-fsync:enospc:2", "cache.manifest.before-rename:enospc:1"])
def test_a_full_disk_in_a_cache_keeps_its_shards_and_the_build_resumes(bench, point):
    out = point.split(":")[0]
    argv = ("cache-teacher", "--teacher", "teacher", "--out", out, *bench.small, "--sequences-per-shard", 16)
    done = bench.run(*argv, fault=point)
    assert done.code == 1
    assert out in done.refusal() and "No space left on device" in done.refusal()
    kept = digests(bench.root / out / "shards")
    assert "train-00000.h5" in kept
    bench.run(*argv).ok()
    assert digests(bench.root / out / "shards").items() >= kept.items()


def test_a_training_that_leaves_the_finite_numbers_fails_and_says_so(bench, cached):
    argv = ("distill", "--cache", "cache", "--student", "student.toml", "--out", "wild", *bench.eager)
    argv += ("--lr", 1e30, "--clip", 0, "--warmup-steps", 0, "--batch-size", 4, "--json")
    done = bench.run(*argv, "--steps", 20)
    assert (done.code, json.loads(done.stdout)["stop_reason"]) == (1, "non-finite")
    assert "step" in done.refusal() and "--lr" in done.refusal()
    assert not (bench.root / "wild/student").exists()


def test_a_training_whose_last_step_leaves_the_finite_numbers_fails_too(bench, cached):
    argv = ("distill", "--cache", "cache", "--student", "student.toml", "--out", "last", *bench.eager)
    argv += ("--lr", 1e18, "--lr-schedule", "constant", "--clip", 0, "--warmup-steps", 0, "--batch-size", 4)
    done = bench.run(*argv, "--steps", 1)
    assert done.code == 1
    assert "diverged at step 1: the validation loss nan" in done.refusal()


def test_non_finite_weights_fail_before_the_first_step(bench, cached):
    write_model_folder(bench.root / "nan", spoiled(tiny_model("llama", 300)), tiny_tokenizer(300))
    argv = ("distill", "--cache", "cache", "--student", "nan", "--out", "from-nan", "--steps", 2)
    done = bench.run(*argv, *bench.eager)
    assert done.code == 1
    assert "nan" in done.refusal()


def spoiled(model):
    next(model.parameters()).data.fill_(float("nan"))
    return model
