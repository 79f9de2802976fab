"""A tail rule that others use, for comparison: the teacher's top-k scaled to 1, the student left over all tokens.

DistillKit's default (`missing_probability_handling: zero`) and the plain top-k of Sparse Logit Sampling (arXiv
2503.16870). The student is driven to put nothing outside the top-k, and too much inside. The entry point of the
package in `benchmarks/others` registers it, as a user's would; `quality-others.toml` trains with it.
"""

import torch
from torch import Tensor

from benchmarks.science.quality_grid import RENORMALIZED_TEACHER
from kdtrain.objective.statistics import Events, Statistics
from kdtrain.objective.tails import register_tail
from kdtrain.objective.targets import SparseTargets


@register_tail(RENORMALIZED_TEACHER)
def renormalized_teacher(targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Events:
    """Scale the teacher's top-k to 1, and leave the student over the whole vocabulary."""
    teacher_RH = torch.log_softmax(beta * targets.logprobs[:, : targets.top_k], dim=-1)
    student_RH = beta * statistics.kept[:, : targets.top_k] - statistics.lse_beta(beta)[:, None]
    return Events(teacher_RH, student_RH)
