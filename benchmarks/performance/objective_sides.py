"""What objective.py compares: value and all gradients of a loss on the logits of an output head, by several hands.

Every side gets the same hidden states [N,D], weight [V,D] and labels, and leaves gradients in both. Their work:

products               the three matrix products alone, as PyTorch makes them in the dtype of the inputs
cross-entropy          torch.compile of F.cross_entropy(h W^T)
kdtrain-cross-entropy  the engine without a teacher
kdtrain-sparse-12, -50 (1 - alpha) CE + alpha T^2 forward KL over 12 or 50 entries and the tail bucket, T = 2
top-k-renormalized-50  the same with renormalised entries on all logits, plain PyTorch
kdtrain-samples-50     (1 - alpha) CE + alpha forward KL from 50 samples and their counts, T = 1: the default codec
axolotl-top-k-50       axolotl's chunked loss over 50 entries, renormalised on both sides; needs its package and Liger's
kdtrain-dense          (1 - alpha) CE + alpha T^2 forward KL over the whole vocabulary, teacher's log p given in fp32

The same work in pairs, over the whole vocabulary:
kdtrain-jsd, trl-jsd     JSD at T = 2; given are all of the teacher's log p in fp32 (kdtrain) or its logits in the dtype
                         of the inputs (TRL). TRL has no cross-entropy.
kdtrain-jsd-online,      cross-entropy and JSD at T = 2; given are the teacher's hidden states and weight, as wide as
liger-jsd, -2048, -4096  the student's. The chunks of Liger have 1,024 rows by default, or as many as its name says.
liger-jsd-triton         JSD without cross-entropy, from the same; Triton.
Cross-entropy alone beside kdtrain-cross-entropy, in Triton: liger-cross-entropy by chunks of rows, -8 by chunks eight
times as large, and cut-cross-entropy. What is written in Triton needs a GPU.
The other sides of kdtrain measure the divergence at T = 1 as well, which a training run logs, and these do not.

Shape suffixes: N tokens, D model width, V vocabulary, K kept entries.
"""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.targets import FLOOR, DenseTargets, OnlineTargets, SparseTargets, Targets

ALPHA, TEMPERATURE = 0.9, 2.0
PEERS = {"trl": "trl", "liger": "liger_kernel", "cut": "cut_cross_entropy"}
PEERS["axolotl"] = "axolotl.integrations.kd.kernels.liger"
"""The module that a side needs which is not ours, by the first word of its name."""
ON_GPU = ("liger-jsd-triton", "liger-cross-entropy", "liger-cross-entropy-8", "cut-cross-entropy")


@dataclass
class Student:
    """The inputs of a side: hidden states and weight that need gradients, and labels."""

    hidden_ND: Tensor
    weight_VD: Tensor
    labels_N: Tensor
    compile: bool = True
    """Whether the sides that can be compiled are."""
    teacher: tuple[Tensor, Tensor] = field(init=False)
    """Hidden states and weight of a teacher as wide as the student."""

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        noise = torch.randn(self.hidden_ND.shape, generator=g).to(self.hidden_ND)
        self.teacher = (self.hidden_ND.detach() + 0.5 * noise, self.weight_VD.detach())

    @property
    def shape(self) -> tuple[int, int]:
        """N and V."""
        return len(self.hidden_ND), len(self.weight_VD)

    def clear(self) -> None:
        """Forget the gradients."""
        self.hidden_ND.grad = self.weight_VD.grad = None

    def logits(self) -> Tensor:
        """Compute all logits [N,V] in the dtype of the inputs."""
        return self.hidden_ND @ self.weight_VD.T

    def teacher_logits(self) -> Tensor:
        """Compute the teacher's logits [N,V]."""
        with torch.no_grad():
            return self.teacher[0] @ self.teacher[1].T


def make_student(
    n: int, width: int, vocab: int, dtype: torch.dtype, device: torch.device | str = "cpu", compile: bool = True
) -> Student:
    """Make random inputs whose logits are about N(0, 2^2), the same numbers on every device."""
    g = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(n, width, generator=g).to(device, dtype).requires_grad_()
    weight_VD = (2 * torch.randn(vocab, width, generator=g) / width**0.5).to(device, dtype).requires_grad_()
    return Student(hidden_ND, weight_VD, torch.randint(vocab, (n,), generator=g).to(device), compile)


def sparse_targets(student: Student, kept: int) -> SparseTargets:
    """Make targets with a top-k of `kept` entries, and four knots of a tail."""
    n, vocab = student.shape
    g = torch.Generator().manual_seed(2)
    first_N1 = torch.randint(vocab, (n, 1), generator=g)
    ids_NK = (first_N1 + torch.arange(kept) * (vocab // kept)) % vocab
    logprobs_NK = torch.log_softmax(2 * torch.randn(n, kept, generator=g), -1).sort(-1, descending=True)[0] - 0.3
    tail_N8 = torch.tensor([-1.35, 0.4, 1.6, 2.8, -4.0, -4.6, -5.0, -5.4]).expand(n, 8).contiguous()
    targets = SparseTargets(
        ids=ids_NK,
        logprobs=logprobs_NK,
        counts=torch.zeros(n, kept),
        tail=tail_N8,
        label_logprob=torch.full((n,), -2.0),
        logit_mean=torch.zeros(n),
        logit_std=torch.ones(n),
        top_k=kept,
        num_samples=0,
        knots=(1.0, 0.7, 0.45, 0.25),
    )
    return targets.to(student.hidden_ND.device)


def sampled_targets(student: Student, drawn: int) -> SparseTargets:
    """Make targets of `drawn` samples alone, as a cache gives them: entries that were not drawn fill up."""
    kept, g = sparse_targets(student, drawn), torch.Generator().manual_seed(3)
    weights_NK = torch.softmax(2 * torch.randn(kept.ids.shape, generator=g), -1)
    ids_NS = weights_NK.multinomial(drawn, replacement=True, generator=g)
    counts_NK = torch.zeros_like(weights_NK).scatter_add_(1, ids_NS, torch.ones_like(weights_NK)).to(kept.ids.device)
    logprobs_NK, tail = (counts_NK / drawn).log().clamp_min(FLOOR), torch.zeros_like(kept.tail[:, :2])
    own = {"logprobs": logprobs_NK, "counts": counts_NK, "tail": tail, "knots": (1.0,), "top_k": 0}
    return replace(kept, num_samples=drawn, **own)


def side(name: str, student: Student) -> Callable[[], Tensor | None]:
    """Return the work of a side, which can be called again and again, and returns its loss, or None for bare products.

    Raises:
        ImportError: its library is not installed.
    """
    return _SIDES[name](student)


def cpu_names() -> list[str]:
    """List all sides that run on a CPU, in the order of tables."""
    return [name for name in _SIDES if name not in ON_GPU]


def available(name: str) -> str | None:
    """Return why a side cannot run here, or None."""
    library = PEERS.get(name.partition("-")[0])
    if name in ON_GPU and not torch.cuda.is_available():
        return f"{name} needs a GPU"
    with contextlib.suppress(ImportError):
        if library is not None:
            importlib.import_module(library)
        return None
    return f"{library} is not installed"


def _backward(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        value = loss()
        value.backward()
        return value.detach()

    return run


def _products(student: Student) -> Callable[[], None]:
    hidden_ND, weight_VD = student.hidden_ND.detach(), student.weight_VD.detach()
    dz_NV = torch.empty(student.shape, dtype=hidden_ND.dtype, device=hidden_ND.device)

    def run() -> None:
        torch.mm(hidden_ND, weight_VD.T, out=dz_NV)
        torch.mm(dz_NV, weight_VD)
        torch.mm(dz_NV.T, hidden_ND)

    return run


def _cross_entropy(student: Student) -> Callable[[], Tensor]:
    def loss(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
        return F.cross_entropy((hidden_ND @ weight_VD.T).float(), labels_N)

    compiled = torch.compile(loss, dynamic=False) if student.compile else loss
    return _backward(lambda: compiled(student.hidden_ND, student.weight_VD, student.labels_N))


def _ours(student: Student, targets: Targets | None, **more: Any) -> Callable[[], Tensor]:
    n, vocab = student.shape
    mask_N = torch.ones(n, dtype=torch.bool, device=student.labels_N.device)

    def loss() -> Tensor:
        return distillation_loss(
            student.hidden_ND,
            HeadPart(student.weight_VD),
            student.labels_N,
            mask_N,
            targets,
            alpha=ALPHA,
            vocab_size=vocab,
            normalizer=float(n),
            compile=student.compile,
            **{"temperature": TEMPERATURE, **more},
        ).loss

    return _backward(loss)


JSD: dict[str, Any] = {"divergence": "jsd", "at_one": False}


def _dense(student: Student) -> DenseTargets:
    return DenseTargets.from_logits(student.teacher_logits(), student.labels_N)


def _online(student: Student) -> OnlineTargets:
    hidden_ND, weight_VD = student.teacher
    return OnlineTargets(hidden_ND, student.labels_N, HeadPart(weight_VD), len(weight_VD))


def _top_k_renormalized(student: Student) -> Callable[[], Tensor]:
    targets = sparse_targets(student, 50)

    def loss() -> Tensor:
        logits_NV = student.logits().float()
        cross_entropy = F.cross_entropy(logits_NV, student.labels_N)
        student_NK = torch.log_softmax(logits_NV.gather(1, targets.ids) / TEMPERATURE, -1)
        teacher_NK = torch.log_softmax(targets.logprobs / TEMPERATURE, -1)
        kd = (teacher_NK.exp() * (teacher_NK - student_NK)).sum(-1).mean()
        return (1 - ALPHA) * cross_entropy + ALPHA * TEMPERATURE**2 * kd

    return _backward(loss)


def _trl(student: Student) -> Callable[[], Tensor]:
    from trl.experimental.gkd import GKDTrainer

    teacher_1NV = student.teacher_logits()[None]
    labels_1N = student.labels_N[None]
    return _backward(
        lambda: GKDTrainer.generalized_jsd_loss(
            student.logits()[None], teacher_1NV, labels_1N, beta=0.5, temperature=TEMPERATURE
        )
    )


def _axolotl(student: Student) -> Callable[[], Tensor]:
    from axolotl.integrations.kd.kernels.liger import LigerFusedLinearKLTopKLogprobLoss

    weights = {"weight_hard_loss": 1 - ALPHA, "weight_soft_loss": ALPHA, "beta": 0.0, "temperature": TEMPERATURE}
    loss, targets = LigerFusedLinearKLTopKLogprobLoss(**weights, compiled=student.compile), sparse_targets(student, 50)
    given = (targets.ids, targets.logprobs, torch.ones_like(targets.ids, dtype=torch.bool), student.labels_N)
    given = tuple(each[None] for each in given)  # one sequence, whose labels it moves by one
    return _backward(lambda: loss(student.weight_VD, student.hidden_ND[None], *given))


def _liger(student: Student, **more: Any) -> Callable[[], Tensor]:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=1 - ALPHA, weight_soft_loss=ALPHA, beta=0.5, temperature=TEMPERATURE, **more
    )
    return _backward(lambda: loss(student.hidden_ND, student.weight_VD, *student.teacher, student.labels_N))


def _liger_triton(student: Student) -> Callable[[], Tensor]:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    loss = LigerFusedLinearJSD(jsd_beta=0.5, temperature=TEMPERATURE)
    return _backward(lambda: loss(student.hidden_ND, student.weight_VD, *student.teacher, student.labels_N))


def _liger_cross_entropy(student: Student, **more: Any) -> Callable[[], Tensor]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as loss

    return _backward(lambda: loss(student.hidden_ND, student.weight_VD, student.labels_N, **more))


def _cut_cross_entropy(student: Student) -> Callable[[], Tensor]:
    from cut_cross_entropy import linear_cross_entropy

    return _backward(lambda: linear_cross_entropy(student.hidden_ND, student.weight_VD, student.labels_N))


_SIDES: dict[str, Callable[[Student], Callable[[], Tensor | None]]] = {
    "products": _products,
    "cross-entropy": _cross_entropy,
    "kdtrain-cross-entropy": lambda student: _ours(student, None),
    "kdtrain-sparse-12": lambda student: _ours(student, sparse_targets(student, 12)),
    "kdtrain-sparse-50": lambda student: _ours(student, sparse_targets(student, 50)),
    "kdtrain-samples-50": lambda student: _ours(student, sampled_targets(student, 50), temperature=1.0),
    "top-k-renormalized-50": _top_k_renormalized,
    "axolotl-top-k-50": _axolotl,
    "kdtrain-dense": lambda student: _ours(student, _dense(student)),
    "kdtrain-jsd": lambda student: _ours(student, _dense(student), **JSD),
    "trl-jsd": _trl,
    "kdtrain-jsd-online": lambda student: _ours(student, _online(student), **JSD),
    "liger-jsd": _liger,
    "liger-jsd-2048": lambda student: _liger(student, chunk_size=2048),
    "liger-jsd-4096": lambda student: _liger(student, chunk_size=4096),
    "liger-jsd-triton": _liger_triton,
    "liger-cross-entropy": _liger_cross_entropy,
    "liger-cross-entropy-8": lambda student: _liger_cross_entropy(student, chunk_mem_const=8),
    "cut-cross-entropy": _cut_cross_entropy,
}
