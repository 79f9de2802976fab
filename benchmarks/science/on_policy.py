"""The students of on-policy.toml, on text that each of them writes and on given text, by one command that resumes.

`python -m benchmarks.science.on_policy` after the commands at the head of on-policy.toml. Each student continues the
same 256 held-out prompts, and the teacher reads what it wrote; both models then read the held-out text itself. All
numbers are exact sums over the vocabulary in fp32, per token, but the share of texts that end and that of 3-grams which
occurred earlier in the same text.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import kdtrain as kd
from benchmarks.harness import RESULTS, write
from benchmarks.harness.command import environment, kdtrain, options
from benchmarks.harness.machine import commit
from kdtrain.config.values import option
from kdtrain.plugins.rounds.figures import repeated

TEACHER, START = "teachers/stdlib-5m", "runs/on-policy-start/student"
ANSWER = 64


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure the students of a sweep, and write benchmarks/results/on-policy.json."""

    sweep: Path = Path("runs/on-policy")
    """Folder of the sweep."""
    prompts: int = option(256, least=1)
    """Held-out prompts, the beginnings of the validation rows of its cache `fixed`."""


def main() -> int:
    """Measure what is missing, and write the result."""
    asked: Settings = options(Settings)
    rows = kd.Cache(asked.sweep / "caches" / "fixed")["validation"]
    tokens_BT = torch.stack([rows[at]["tokens"] for at in range(asked.prompts)])
    own = {"teacher": _model(TEACHER), "tokenizer": AutoTokenizer.from_pretrained(TEACHER, trust_remote_code=False)}
    runs = sorted(path.parent for path in asked.sweep.glob("*/seed-*/result.json"))
    found: dict[str, Any] = {"start": _once(asked.sweep / "start.json", Path(START), tokens_BT, own)}
    for run in runs:
        if not (run / "last").exists():
            kdtrain("export", str(run), "--checkpoint", "latest", "--out", str(run / "last"))
        found[f"{run.parent.name}/{run.name}"] = _once(run / "texts.json", run / "last", tokens_BT, own)
    record: dict[str, Any] = {"command": "python -m benchmarks.science.on_policy", "commit": commit()}
    record |= {"environment": environment(runs[0]), "prompts": asked.prompts, "students": found}
    write(RESULTS / "on-policy.json", record)
    return 0


def _model(folder: str | Path) -> Any:
    """Load a causal language model in fp32, in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()


def _once(file: Path, student: Path, tokens_BT: Tensor, own: dict[str, Any]) -> dict[str, float]:
    """Measure a student by both texts, unless the file has that already."""
    if file.exists():
        return dict(json.loads(file.read_text()))
    model, prompt = _model(student), tokens_BT.shape[1] - ANSWER
    given_BT = torch.ones_like(tokens_BT[:, 1:], dtype=torch.bool)
    found = {f"fixed_{name}": value for name, value in _compare(model, own["teacher"], tokens_BT, given_BT).items()}
    texts = kd.rollouts(model, prompts=tokens_BT[:, :prompt].tolist(), max_new_tokens=ANSWER, **own)
    batch = texts.read(range(len(texts)))
    found |= _compare(model, own["teacher"], batch.tokens, batch.loss_mask)
    end = own["tokenizer"].eos_token_id
    ended = sum(end in row["tokens"][1:][row["loss_mask"]].tolist() for row in texts)
    found |= {"ended": ended / len(texts), "repeated": repeated(batch.tokens.numpy(), batch.loss_mask.numpy())}
    write(file, found)
    return found


@torch.no_grad()
def _compare(student: Any, teacher: Any, tokens_BT1: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """Compute the loss of the text by the teacher, both KL divergences and both entropies, nats per token."""
    sums = torch.zeros(6, dtype=torch.float64)
    for tokens_bT1, mask_bT in zip(tokens_BT1.split(16), mask_BT.split(16), strict=True):
        q, p = (model(tokens_bT1[:, :-1]).logits.log_softmax(-1)[mask_bT] for model in (student, teacher))
        label = tokens_bT1[:, 1:][mask_bT][:, None]
        losses = (-p.gather(1, label), p.exp() * (p - q), q.exp() * (q - p), -q.exp() * q, -p.exp() * p)
        sums += torch.stack([*(each.double().sum() for each in losses), mask_bT.sum().double()])
    names = ("teacher_loss", "forward_kl", "reverse_kl", "entropy", "teacher_entropy")
    return dict(zip(names, (sums[:5] / sums[5]).tolist(), strict=True))


if __name__ == "__main__":
    sys.exit(main())
