"""How far the gradient of training from a sparse cache is from that of the full distribution: RS-KD's Table 3 again.

`python -m benchmarks.science.gradient_angles` writes benchmarks/results/gradient_angles.json: angle in degrees and norm
ratio of the distillation gradient (alpha 1, T = 1) of one batch of 8,192 tokens, in three spaces:
    parameters   all weights of the student, the mean over the batch: what an optimizer sees
    output head  the weight of the output head (tied to the embedding, with both its gradients)
    logits       the gradients of all tokens in the logits, as one long vector: nothing averages out
Sparse Logit Sampling (arXiv 2503.16870) reports 58 degrees for top-12, 30 for top-300 and 4 for RS-12. `parameters` is
what is compared with that: a dozen sampled tokens are tens of degrees off in the logits of one position, so that 4
degrees can only be those of a mean over a batch. Top-k is shown in both common forms: `drop` (the teacher's true
probabilities) and `renormalize` (scaled to 1). RS-12 is 50 samples, of which 12 are distinct there; `unique` says how
many are here.

Teacher: the shipped one. Students: students/stdlib-1m.toml after a few hundred steps of full distillation, and
untrained. Targets are those of the codec, before the 8-bit coding (an error of 0.03 nats at log p = -10).
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, STUDENT, TEACHER, write
from benchmarks.harness.command import kdtrain
from benchmarks.harness.models import packed, teacher_logits, token_tensor
from kdtrain.cache.format.codec import decode, encode_sequences
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.models.head import SplitModel, split
from kdtrain.models.loading import load_student
from kdtrain.models.output_head import HeadPart
from kdtrain.models.spec import ModelSpec
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.targets import DenseTargets, SparseTargets
from kdtrain.run.saved_student import open_student

RESULT = RESULTS / "gradient_angles.json"
SEQUENCES, LENGTH, MICRO = 32, 256, 4
CPU = torch.device("cpu")
CASES: list[tuple[int, int, tuple[str, ...]]] = [
    (12, 0, ("drop", "renormalize", "ghost")),
    (50, 0, ("drop", "renormalize", "ghost")),
    (300, 0, ("drop", "renormalize", "ghost")),
    (0, 12, ("sampled",)),
    (0, 50, ("sampled",)),
    (8, 24, ("sampled", "control-variate")),
]


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps that the trained student is trained for")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    tokens_BT, logits_BTV = batch()
    untrained = split(load_student(ModelSpec.read(STUDENT), vocab_size=logits_BTV.shape[-1], seed=0, device="cpu"))
    students = {"untrained": untrained, f"{options.steps} steps": trained(options.steps)}
    found = {name: angles(student, tokens_BT, logits_BTV) for name, student in students.items()}
    settings = {"tokens": SEQUENCES * LENGTH, "temperature": 1.0, "teacher": "stdlib-5m", "student": "stdlib-1m"}
    write(options.result, {**settings, "students": found})
    for name, each in found.items():
        print(f"{name}: KL {each['kl']:.3f}")
        for row in each["rules"]:
            three = (f"{row[space]['angle']:6.1f}" for space in ("parameters", "output head", "logits"))
            print(f"  top-k {row['top_k']:3} samples {row['num_samples']:2} {row['rule']:16}", *three)
    return 0


def batch() -> tuple[Tensor, Tensor]:
    """Return validation tokens [B, T+1] and the teacher's logits [B, T, V]."""
    tokens_BT, teacher = token_tensor(packed(TEACHER, "validation", SEQUENCES, LENGTH)), teacher_logits(TEACHER)
    return tokens_BT, torch.cat([teacher(row[None, :-1], None) for row in tokens_BT])


def trained(steps: int) -> SplitModel:
    """Train the student for some steps by distillation from whole distributions of the teacher."""
    with tempfile.TemporaryDirectory() as scratch:
        words = f"--data stdlib --seq-len {LENGTH} --num-sequences {8 * steps} --validation-sequences 8 --alpha 1"
        words += f" --temperature 1 --steps {steps} --batch-size 8 --lr 2e-3 --no-compile --precision fp32"
        places = ["--teacher", TEACHER, "--student", STUDENT, "--out", f"{scratch}/run"]
        kdtrain("distill", *places, *words.split())
        return open_student(f"{scratch}/run", CPU)[0]


def angles(student: SplitModel, tokens_BT: Tensor, logits_BTV: Tensor) -> dict[str, Any]:
    """Compute the student's KL from the teacher, and a row for each case and rule."""
    student.eval()
    kl, full = gradient(
        student,
        tokens_BT,
        [DenseTargets.from_logits(z.flatten(0, 1), x[:, 1:].flatten()) for x, z in parts(tokens_BT, logits_BTV)],
    )
    found = []
    for top_k, num_samples, rules in CASES:
        spec = CodecSpec(kind="sparse", vocab_size=logits_BTV.shape[-1], top_k=top_k, num_samples=num_samples)
        targets = []
        for number, (part_BT, part_BTV) in enumerate(parts(tokens_BT, logits_BTV)):
            first = number * MICRO
            kept = encode_sequences(part_BTV, part_BT[:, 1:], spec, seed=0, split="validation", first=first)
            decoded = decode(kept, spec)
            assert isinstance(decoded, SparseTargets)
            targets.append(decoded)
        unique = sum((each.counts > 0).sum().item() for each in targets) / sum(len(each) for each in targets)
        for rule in rules:
            _, other = gradient(student, tokens_BT, targets, "ghost" if rule == "sampled" else rule)
            spaces = {space: compare(full[space], other[space]) for space in full}
            found.append({"top_k": top_k, "num_samples": num_samples, "unique": unique, "rule": rule, **spaces})
    return {"kl": kl, "rules": found}


def parts(tokens_BT: Tensor, logits_BTV: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Split tokens and logits into micro-batches."""
    return list(zip(tokens_BT.split(MICRO), logits_BTV.split(MICRO), strict=True))


def gradient(
    student: SplitModel, tokens_BT: Tensor, targets: list, tail: str = "ghost"
) -> tuple[float, dict[str, Tensor]]:
    """Compute KD a token, and the gradient of its mean over the batch by space."""
    student.zero_grad()
    number, total, of_logits = tokens_BT[:, 1:].numel(), 0.0, []
    for part_BT, given in zip(tokens_BT.split(MICRO), targets, strict=True):
        z_NV = student.head(student(part_BT[:, :-1], None)).flatten(0, 1)
        z_NV.retain_grad()
        labels_N = part_BT[:, 1:].flatten()
        mask_N = torch.ones_like(labels_N, dtype=torch.bool)
        settings = {"temperature": 1.0, "alpha": 1.0, "tail": tail, "vocab_size": z_NV.shape[1], "normalizer": number}
        out = distillation_loss(z_NV, HeadPart(), labels_N, mask_N, given, **settings)  # type: ignore[arg-type]
        out.loss.backward()
        total += out.kd.item()
        assert z_NV.grad is not None
        of_logits.append(z_NV.grad.flatten())
    weights = [each.grad.flatten() for each in student.parameters() if each.grad is not None]
    top_k = student.head.weight
    assert top_k is not None and top_k.grad is not None
    found = {
        "parameters": torch.cat(weights),
        "output head": top_k.grad.flatten().clone(),
        "logits": torch.cat(of_logits),
    }
    return total / number, found


def compare(full: Tensor, other: Tensor) -> dict[str, float]:
    """Compute the angle in degrees and |other| / |full|."""
    full, other = full.double(), other.double()
    cosine = (full @ other / full.norm() / other.norm()).clamp(-1, 1).item()
    return {"angle": math.degrees(math.acos(cosine)), "norm": (other.norm() / full.norm()).item()}


if __name__ == "__main__":
    sys.exit(main())
