"""What objective.py compares: value and all gradients of a loss on the logits of an output head, by several hands.

Every side gets the same hidden states [N,D], weight [V,D] and labels, and leaves gradients in both. Their work:

products               the three matrix products alone, as PyTorch makes them in the dtype of the inputs
cross-entropy          torch.compile of F.cross_entropy(h W^T)
kdtrain-cross-entropy  the engine without a teacher
kdtrain-sparse-12, -50 (1 - alpha) CE + alpha T^2 forward KL over 12 or 50 entries and the tail bucket, T = 2
top-k-renormalized-50  the same with renormalised entries on all logits, plain PyTorch
kdtrain-dense          (1 - alpha) CE + alpha T^2 forward KL over the whole vocabulary, teacher's log p given in fp32

The same work in pairs, over the whole vocabulary:
kdtrain-jsd, trl-jsd     JSD at T = 2; given are all of the teacher's log p in fp32 (kdtrain) or its logits in the dtype
                         of the inputs (TRL). TRL has no cross-entropy.
kdtrain-jsd-online,      cross-entropy and JSD at T = 2; given are the teacher's hidden states and weight, as wide as
liger-jsd                the student's.
Cross-entropy alone, by chunks of rows: liger-cross-entropy beside kdtrain-cross-entropy. It is written in Triton and
needs a GPU.
The other sides of kdtrain measure the divergence at T = 1 as well, which a training run logs, and these do not.

Shape suffixes: N tokens, D model width, V vocabulary, K kept entries.
"""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kdtrain.models.head import OutputHead
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.targets import DenseTargets, OnlineTargets, SparseTargets, Targets

ALPHA, TEMPERATURE = 0.9, 2.0
PEERS = {"trl-jsd": "trl", "liger-jsd": "liger_kernel", "liger-cross-entropy": "liger_kernel"}
"""The sides that need a library which is not ours, and its name."""


@dataclass
class Student:
    """The inputs of a side: hidden states and weight that want gradients, and labels."""

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
        """All logits [N,V] in the dtype of the inputs."""
        return self.hidden_ND @ self.weight_VD.T

    def teacher_logits(self) -> Tensor:
        """The teacher's [N,V]."""
        with torch.no_grad():
            return self.teacher[0] @ self.teacher[1].T


def make_student(
    n: int, width: int, vocab: int, dtype: torch.dtype, device: torch.device | str = "cpu", compile: bool = True
) -> Student:
    """Random inputs whose logits are about N(0, 2^2), the same numbers on every device."""
    g = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(n, width, generator=g).to(device, dtype).requires_grad_()
    weight_VD = (2 * torch.randn(vocab, width, generator=g) / width**0.5).to(device, dtype).requires_grad_()
    return Student(hidden_ND, weight_VD, torch.randint(vocab, (n,), generator=g).to(device), compile)


def sparse_targets(student: Student, kept: int) -> SparseTargets:
    """Targets with a head of `kept` entries, and four knots of a tail."""
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


def side(name: str, student: Student) -> Callable[[], Tensor | None]:
    """The work of a side, to be called again and again; its loss, or None for bare products.

    Raises:
        ImportError: its library is not installed.
    """
    return _SIDES[name](student)


def cpu_names() -> list[str]:
    """All sides that run on a CPU, in the order of tables."""
    return [name for name in _SIDES if name != "liger-cross-entropy"]


def available(name: str) -> str | None:
    """Why a side cannot be had here, or None."""
    library = PEERS.get(name)
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
            OutputHead(student.weight_VD),
            student.labels_N,
            mask_N,
            targets,
            temperature=TEMPERATURE,
            alpha=ALPHA,
            vocab_size=vocab,
            normalizer=float(n),
            compile=student.compile,
            **more,
        ).loss

    return _backward(loss)


JSD: dict[str, Any] = {"divergence": "jsd", "at_one": False}


def _dense(student: Student) -> DenseTargets:
    return DenseTargets.from_logits(student.teacher_logits(), student.labels_N)


def _online(student: Student) -> OnlineTargets:
    hidden_ND, weight_VD = student.teacher
    return OnlineTargets(hidden_ND, student.labels_N, OutputHead(weight_VD), len(weight_VD))


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


def _liger(student: Student) -> Callable[[], Tensor]:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=1 - ALPHA, weight_soft_loss=ALPHA, beta=0.5, temperature=TEMPERATURE
    )
    return _backward(lambda: loss(student.hidden_ND, student.weight_VD, *student.teacher, student.labels_N))


def _liger_cross_entropy(student: Student) -> Callable[[], Tensor]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return _backward(lambda: loss(student.weight_VD, student.hidden_ND, student.labels_N))


_SIDES: dict[str, Callable[[Student], Callable[[], Tensor | None]]] = {
    "products": _products,
    "cross-entropy": _cross_entropy,
    "kdtrain-cross-entropy": lambda student: _ours(student, None),
    "kdtrain-sparse-12": lambda student: _ours(student, sparse_targets(student, 12)),
    "kdtrain-sparse-50": lambda student: _ours(student, sparse_targets(student, 50)),
    "top-k-renormalized-50": _top_k_renormalized,
    "kdtrain-dense": lambda student: _ours(student, _dense(student)),
    "kdtrain-jsd": lambda student: _ours(student, _dense(student), **JSD),
    "trl-jsd": _trl,
    "kdtrain-jsd-online": lambda student: _ours(student, _online(student), **JSD),
    "liger-jsd": _liger,
    "liger-cross-entropy": _liger_cross_entropy,
}
