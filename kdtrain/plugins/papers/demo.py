"""`kdtrain demo`: the shipped teacher into a student of a fifth of its size, with and without distillation.

A sweep of two arms, whose file it writes: one cache of the teacher over the standard library of this Python; for each
seed two students on the same tokens, steps and learning rate, by cross-entropy (`alpha = 0`) and by distillation with
the defaults; and both measured on the test split against the teacher itself. The same command resumes.
"""

import importlib.util
import time
from pathlib import Path

from kdtrain.errors import UsageError, log
from kdtrain.monitor.progress import setup_logging
from kdtrain.outputs import OutFolder
from kdtrain.plugins.papers import DemoConfig, PlotConfig
from kdtrain.plugins.papers.compare import compare
from kdtrain.plugins.papers.jobs import read_sweep
from kdtrain.plugins.papers.sweep import run

SETTINGS = {"seq_len": 256, "sequences": 3000, "validation": 128, "test": 400, "steps": 300, "eval": 50, "more": ""}
"""Made for four minutes on two cores."""
QUICK = SETTINGS | {"seq_len": 128, "sequences": 800, "validation": 64, "test": 48, "steps": 80, "eval": 20}
QUICK["more"] = "compile = false\n"
"""Under two minutes on two cores; so few steps do not repay a compilation."""
SHOWN = (
    *("best_validation_loss", "teacher_validation_loss", "kl", "test_loss", "test_teacher_loss", "test_kl"),
    *("test_agreement", "test_acceptance", "test_accuracy", "test_ece", "tokens", "tokens_per_second"),
)
"""The numbers of its table."""
FILE = """\
# kdtrain sweep {name}
seeds = {seeds}

[caches.stdlib]
teacher = "stdlib-5m"
data = "stdlib"
seq_len = {seq_len}
num_sequences = {sequences}
validation_sequences = {validation}

[common]
student = "stdlib-1m"
cache = "stdlib"
steps = {steps}
batch_size = 16
lr = 3e-3
eval_freq = {eval}
log_to = "none"
{more}
[arms.cross-entropy]
alpha = 0

[arms.distilled]

[test]
teacher = "stdlib-5m"
data = "stdlib"
split = "test"
seq_len = {seq_len}
num_sequences = {test}
"""


def main(config: DemoConfig) -> int:
    """Run the demo, or what is left of it, and show the table and where everything is.

    UsageError: the folder holds something else. RunError: a part of it failed.
    """
    started = time.monotonic()
    setup_logging()
    file = config.out / "demo.toml"
    settings = QUICK if config.quick else SETTINGS
    text = FILE.format(**settings, name=file, seeds=list(range(config.seeds)))
    _refuse_foreign(config.out, file, text)
    OutFolder(config.out).publish(file.name, text, "demo.record")
    sweep = read_sweep(file, config.out)
    groups = run(sweep, at_once=1)
    sweep.refuse_missing()
    if groups is None:
        return 0
    compare(groups, config, names=SHOWN)
    if not config.json:
        print(f"files: {config.out}{pictures(config.out)}; kdtrain sweep {file} runs it again with what you change")
    log.info("took %.1f minutes", (time.monotonic() - started) / 60)
    return 0


def _refuse_foreign(out: Path, file: Path, text: str) -> None:
    """Raise UsageError if the folder holds something else, or a demo of other settings but for its seeds."""

    def settings(each: str) -> list[str]:
        return [line for line in each.splitlines() if not line.startswith("seeds = ")]

    if out.is_dir() and not (out / "sweep.json").exists() and OutFolder(out).others(file.name):
        raise UsageError(f"--out {out} holds something that is not a demo; name another folder")
    if file.exists() and settings(file.read_text(errors="replace")) != settings(text):
        raise UsageError(f"{file} is of other settings, or not of a demo; name another --out, or kdtrain sweep {file}")


def pictures(out: Path) -> str:
    """Draw the curves where matplotlib is installed, else say how to get it."""
    if importlib.util.find_spec("matplotlib") is None:
        log.info("no picture without matplotlib: pip install 'kdtrain[plot]', and the same command draws it")
        return ""
    from kdtrain.plugins.papers.plot import draw

    path = out / "curves.png"
    runs = tuple(sorted(out.glob("*/seed-*")))
    draw(PlotConfig(runs=runs, out=path, y="validation/loss,validation/kl,validation/ece", overwrite=True))
    return f"; picture: {path}"
