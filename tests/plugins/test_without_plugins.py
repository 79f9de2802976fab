"""The core alone: what works where the folder of the plugins was deleted."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kdtrain
from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder

EACH = """
import json, os, runpy, sys
import torch, transformers
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in getattr(each, "__module__", "")]
for argv in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        torch.set_num_threads(1)
        sys.argv = ["kdtrain", *argv]
        code = 0
        try:
            runpy.run_module("kdtrain", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code or 0
        sys.stdout.flush()
        os._exit(code)
    print("code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
import kdtrain as kd
print("runs", json.dumps([run["status"] for run in kd.runs("run")]))
"""
"""Runs each command of its first argument in a fork; prints their exit codes, and the runs that the library reads."""


def test_a_cache_a_run_its_resume_and_an_evaluation_need_no_plugin(tmp_path):
    shutil.copytree(
        Path(kdtrain.__file__).parent, tmp_path / "kdtrain", ignore=shutil.ignore_patterns("plugins", "__pycache__")
    )
    write_model_folder(tmp_path / "teacher", tiny_model("llama", 300, seed=1), tiny_tokenizer(300))
    shape = "".join(f"{key} = {json.dumps(value)}\n" for key, value in SHAPES["llama"].items())
    (tmp_path / "s.toml").write_text(f"tokenizer = 'teacher'\n\n[config]\n{shape}")
    (tmp_path / "t.txt").write_text("".join(f"{number} squared is {number * number}.\n" for number in range(400)))
    text = ("--data", "t.txt", "--seq-len", "32", "--num-workers", "0", "--validation-sequences", "4")
    fp32 = ("--precision", "fp32")
    run = ("distill", "--cache", "cache", "--student", "s.toml", "--out", "run", "--batch-size", "4", "--no-compile")
    commands = [
        ("cache-teacher", "--teacher", "teacher", *text, "--num-sequences", "16", "--out", "cache", *fp32),
        (*run, *fp32, "--steps", "2"),
        (*run, *fp32, "--steps", "4", "--resume", "latest"),
        ("evaluate", "--student", "run", "--cache", "cache"),
        ("--help",),
        ("sweep", "x.toml"),
        (*run, *fp32, "--on-event", "true"),
        (*run, *fp32, "--log-to", "wandb"),
    ]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", EACH, json.dumps(commands)]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    codes = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("code ")]
    assert codes == [0, 0, 0, 0, 0, 2, 2, 2], done.stderr
    assert 'runs ["done 4/4"]' in done.stdout and not (tmp_path / "run/tensorboard").exists()
    assert "  distill " in done.stdout and "  compare " not in done.stdout
    for refused in ("unknown command 'sweep'", "--on-event needs kdtrain/plugins/loggers", "--log-to wandb is unknown"):
        assert f"kdtrain: {refused}" in done.stderr
