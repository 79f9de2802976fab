"""How far the gradient of each tail rule is from that of the full KL, by how far the student is from the teacher.

`python -m benchmarks.science.tail_rules [--teacher SPEC]` writes benchmarks/results/tail_rules.json. This is what the
clip of `--tail control-variate` was chosen by (`kdtrain/objective/tails.py`); the candidates are written out
here again, over the whole vocabulary and without the engine.

For each token the gradient in the student's logits is known in closed form, and so are mean and variance of an estimate
over its samples: nothing is simulated. With q' the student's softmax over the tail, P and pi the teacher's tail mass
and the chance of a sample, r q_k = P q'_k what the student's own tail would make of P, and x_k = r q_k / p_k, one
sample k adds
    -(v_k / pi_k) (e_k - q')        to the gradient of the ghost bucket, with v_k =
    p_k - r q_k                     control variate
    p_k - r q_k, r q_k at most C p_k    clipped at C: unbiased where it is not
    the same with a share s         s = exp(-K d) on r q_k, d being KL over top-k and bucket at T = 1: unbiased for
                                    every s where no weight is cut, because d is not from the samples
    the same with p_k / pi_k at most W times P, its mean (1 at T = 1, without a bound above it)
    p_k - s r q_k, best s           of each token, for the least variance: what no rule can know
    s (p_k - r q_k)                 blended from the ghost bucket: biased
Plain sampling (RS-KD, arXiv 2503.16870) has p_k and q, and no ghost bucket: its samples move the top-k too.
All this is for independent samples. Those of a cache are systematic, and their noise is less (`codec.draw_points`).

`token`: mean over tokens of |estimate - full|^2, expected, over the mean of |full|^2. `batch`: the same for the mean
gradient of 4,096 tokens like these, whose noise averages out and whose bias does not. Students: the teacher's log p
plus normal noise, 0.7 log p plus noise of 0.5 nats, the teacher's mean over other text (unigrams) and what lies half
way to it, and the uniform distribution.

Shapes: N tokens, V vocabulary, H head.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, TEACHER, write
from benchmarks.harness.models import packed, teacher_logits, token_tensor

RESULT = RESULTS / "tail_rules.json"
KEPT = ((12, 0), (8, 24))
TEMPERATURES = (1.0, 2.0, 4.0)
CLIPS, SHARPNESS = (2.0, 4.0, 8.0), (1.0, 4.0, 16.0)
BATCH = 4096


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--teacher", default=TEACHER)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    energy_NV, other_NV = energies(options.teacher, 2 * options.sequences).chunk(2)
    found: dict[str, Any] = {}
    for name, student_NV in students(energy_NV, other_NV.exp().mean(0).log()).items():
        kl = (energy_NV.exp() * (energy_NV - student_NV.log_softmax(-1))).sum(-1).mean().item()
        found[name] = {"kl": kl} | {
            f"top-k {top_k}, samples {num_samples}, T={temperature:g}": compare(
                energy_NV, student_NV, top_k, num_samples, temperature
            )
            for top_k, num_samples in KEPT
            for temperature in TEMPERATURES
        }
        print(f"{name}: KL {kl:.3f}", file=sys.stderr)
    settings = {"teacher": Path(options.teacher).stem, "tokens": len(energy_NV), "batch": BATCH}
    write(options.result, {**settings, "students": found})
    return 0


def energies(spec_name: str, sequences: int) -> Tensor:
    """Compute log p [N, V] in fp64 of the teacher at 128 positions of each of some validation sequences."""
    tokens_BT, teacher = token_tensor(packed(spec_name, "validation", sequences, 512)), teacher_logits(spec_name)
    return torch.cat([teacher(row[None, :-1], None)[0, ::4].double().log_softmax(-1) for row in tokens_BT])


def students(energy_NV: Tensor, unigram_V: Tensor) -> dict[str, Tensor]:
    """Make logits [N, V] by name, near ones first."""
    noise_NV = torch.randn(energy_NV.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    near = {f"log p + noise of {sigma:g}": energy_NV + sigma * noise_NV for sigma in (0.1, 0.3, 1.0, 2.0)}
    return near | {
        "0.7 log p + noise of 0.5": 0.7 * energy_NV + 0.5 * noise_NV,
        "half way to unigrams": 0.5 * (energy_NV + unigram_V),
        "unigrams": unigram_V.expand_as(energy_NV),
        "uniform": torch.zeros_like(energy_NV),
    }


def compare(energy_NV: Tensor, student_NV: Tensor, top_k: int, num_samples: int, temperature: float) -> dict[str, Any]:
    """Compute relative squared errors by rule, of a token and of a batch."""
    case = Case(energy_NV, student_NV, top_k, 1 / temperature)
    rules: dict[str, tuple[Tensor, Tensor | None]] = {"ghost": (case.ghost_NV, None)}
    if num_samples:
        rules |= case.estimates(num_samples)
    found = {}
    for name, (mean_NV, spread_N) in rules.items():
        noise = 0.0 if spread_N is None else spread_N.mean().item() / num_samples
        bias_NV = mean_NV - case.full_NV
        token = bias_NV.square().sum(-1).mean().item() + noise
        batch = bias_NV.mean(0).square().sum().item() + noise / BATCH
        found[name] = {
            "token": token / case.full_NV.square().sum(-1).mean().item(),
            "batch": batch / case.full_NV.mean(0).square().sum().item(),
        }
    return found


class Case:
    """One student at one temperature: gradients less their factor beta, means and variances a draw."""

    def __init__(self, energy_NV: Tensor, student_NV: Tensor, top_k: int, beta: float) -> None:
        self.p_NV, self.q_NV = (beta * energy_NV).softmax(-1), (beta * student_NV).softmax(-1)
        top_NH = energy_NV.topk(top_k).indices
        self.outside_NV = torch.ones_like(energy_NV).scatter(1, top_NH, 0.0)
        self.tail_p_NV, tail_q_NV = self.p_NV * self.outside_NV, self.q_NV * self.outside_NV
        self.mass_N1 = self.tail_p_NV.sum(-1, keepdim=True)
        student_mass_N1 = tail_q_NV.sum(-1, keepdim=True)
        self.inner_NV = tail_q_NV / student_mass_N1
        self.shaped_NV = self.mass_N1 * self.inner_NV
        chance_NV = energy_NV.exp() * self.outside_NV
        self.chance_NV = chance_NV / chance_NV.sum(-1, keepdim=True)
        self.full_NV = self.q_NV - self.p_NV
        self.ghost_NV = self.q_NV - torch.where(self.outside_NV > 0, self.shaped_NV, self.p_NV)
        log_q_NV = student_NV.log_softmax(-1)
        inside_NV = energy_NV.exp() * (energy_NV - log_q_NV) * (1 - self.outside_NV)
        p_N1, q_N1 = ((x.exp() * self.outside_NV).sum(-1, keepdim=True) for x in (energy_NV, log_q_NV))
        self.distance_N1 = inside_NV.sum(-1, keepdim=True) + p_N1 * (p_N1 / q_N1).log()

    def estimates(self, num_samples: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Compute by rule the mean of the estimated gradient [N, V], and the variance of one draw, summed [N]."""
        p_NV, shaped_NV = self.tail_p_NV, self.shaped_NV
        best_N1 = self._best()
        plain_NV = self.q_NV * p_NV.sum(-1, keepdim=True) - p_NV
        found = {
            "sampled": (self.full_NV, self._square(p_NV, self.q_NV) - plain_NV.square().sum(-1)),
            "control variate": self._inside(p_NV - shaped_NV),
        }
        found |= {f"clip {c:g}": self._inside(self._clipped(c)) for c in CLIPS}
        close_N1 = {k: (-k * self.distance_N1).exp() for k in SHARPNESS}
        found |= {f"share {k:g}": self._inside(p_NV - close_N1[k] * shaped_NV) for k in SHARPNESS}
        shares = [(k, c) for k in SHARPNESS for c in CLIPS]
        found |= {f"share {k:g}, clip {c:g}": self._inside(self._clipped(c, close_N1[k])) for k, c in shares}
        ratio_NV = p_NV / self.mass_N1 / self.chance_NV.clamp(min=1e-300)
        for name, most in (("2", 2.0), ("sqrt(n)", num_samples**0.5), ("n", num_samples)):
            bound_NV = (most / ratio_NV.clamp(min=1e-300)).clamp(max=1.0)
            found[f"share 4, clip 4, weight {name}"] = self._inside(bound_NV * self._clipped(4.0, close_N1[4.0]))
        return found | {
            "best share": self._inside(p_NV - best_N1 * shaped_NV),
            "blend from ghost": self._inside(close_N1[1.0] * (p_NV - shaped_NV)),
        }

    def _clipped(self, clip: float, share_N1: Tensor | float = 1.0) -> Tensor:
        return self.tail_p_NV - share_N1 * torch.minimum(self.shaped_NV, clip * self.tail_p_NV)

    def _inside(self, value_NV: Tensor) -> tuple[Tensor, Tensor]:
        mean_NV = self.inner_NV * value_NV.sum(-1, keepdim=True) - value_NV
        return self.ghost_NV + mean_NV, self._square(value_NV, self.inner_NV) - mean_NV.square().sum(-1)

    def _square(self, value_NV: Tensor, base_NV: Tensor) -> Tensor:
        """Compute the mean over samples k of |(value_k / chance_k) (e_k - base)|^2, [N]."""
        size_NV = 1 - 2 * base_NV + base_NV.square().sum(-1, keepdim=True)
        return (value_NV.square() / self.chance_NV.clamp(min=1e-300) * size_NV * self.outside_NV).sum(-1)

    def _best(self) -> Tensor:
        """Return the blend [N, 1] with the least variance."""
        weight_NV = (1 - 2 * self.inner_NV + self.inner_NV.square().sum(-1, keepdim=True)) * self.outside_NV
        weight_NV = weight_NV / self.chance_NV.clamp(min=1e-300)
        mixed_N1 = (weight_NV * self.tail_p_NV * self.shaped_NV).sum(-1, keepdim=True)
        return mixed_N1 / (weight_NV * self.shaped_NV.square()).sum(-1, keepdim=True)


if __name__ == "__main__":
    sys.exit(main())
