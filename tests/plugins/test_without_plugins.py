"""kdtrain without its plugins: their folder is deleted from a copy, and the entry points stay."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = """
import sys
from kdtrain import cli
for words in (
    ["--help"],
    ["cache-teacher", *"--teacher teacher --data text.txt --out cache --seq-len 32 --num-sequences 16".split(),
     *"--validation-sequences 4 --top-k 8 --precision fp32".split()],
    *(["distill", *"--cache cache --student student.toml --out run --batch-size 4 --no-compile --eval-freq 2".split(),
       *"--precision fp32 --steps".split(), steps] for steps in ("2", "4")),
    ["evaluate", "--student", "run", "--cache", "cache"],
    ["export", "run", "--out", "exported"],
    ["distill", "--collect-tensors", "*"],
    ["distill", "--on-event", "true"],
    ["sweep", "arms.toml"],
):
    try:
        cli.main(words)
    except SystemExit as end:
        assert end.code == (2 if {*words} & {"--collect-tensors", "--on-event", "sweep"} else 0), words
import kdtrain as kd
assert not hasattr(kd, "runs") and "runs" not in kd.__all__ and kd.Cache
assert not any(name.startswith("kdtrain.plugins") for name in sys.modules)
"""


def test_the_main_job_runs_and_resumes_where_the_folder_of_plugins_is_deleted(tmp_path):
    site = tmp_path / "site"
    shutil.copytree(ROOT / "kdtrain", site / "kdtrain", ignore=shutil.ignore_patterns("__pycache__", "plugins"))
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {"kdtrain.commands", "kdtrain.sections", "kdtrain.observers", "kdtrain.teachers"} <= groups.keys()
    info = site / "kdtrain-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kdtrain\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in each.items()) for group, each in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    write_model_folder(tmp_path / "teacher", tiny_model("llama", 300, seed=1), tiny_tokenizer(300))
    shape = "".join(f"{key} = {json.dumps(value)}\n" for key, value in SHAPES["llama"].items())
    (tmp_path / "student.toml").write_text(f"tokenizer = 'teacher'\n\n[config]\n{shape}")
    (tmp_path / "text.txt").write_text("\n\n".join(f"{n} and {n + 1} are {2 * n + 1}. " * 8 for n in range(60)))
    only = f"sys.path.insert(0, {str(site)!r})\n"
    only += "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in getattr(each, '__module__', '')]\n"
    code = COMMANDS.replace("from kdtrain", f"{only}from kdtrain", 1)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resum" in done.stderr and json.loads((tmp_path / "run/result.json").read_text())["step"] == 4
    assert "--collect-tensors: no such option" in done.stderr and "unknown command 'sweep'" in done.stderr
    assert "--on-event needs kdtrain/plugins/loggers" in done.stderr and not (tmp_path / "run/tensorboard").exists()
    assert (tmp_path / "exported/model.safetensors").exists()
