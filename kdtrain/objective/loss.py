"""The distillation loss of a micro-batch: (1 - alpha) CE + alpha T^2 KD.

CE is the cross-entropy with the labels, KD the divergence from the teacher at temperature T of both sides,
each summed over unmasked tokens and divided by the number of unmasked tokens of the whole step, over all
micro-batches and ranks. That number comes from the caller, so that the gradient of a step does not depend on
how its sequences are divided. T^2 keeps the size of KD's gradient as T grows (Hinton et al. 2015, arXiv
1503.02531, section 2); the gradient in T is that of the whole term, T^2 included.

Without targets or with alpha 0 this is plain cross-entropy, and no divergence is computed or reported. Where a batch
mixes rows with a teacher and rows without (`objective.mixed`), the latter count by CE with the weight 1, over the same
number of tokens.
`DistillationLoss` is the loss with its temperature; it calls `distillation_loss`, a function of tensors.

Shape suffixes: N tokens (B*T flattened, row-major), R rows of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kdtrain.config.choices import DIVERGENCES, TAILS, resolve_tail
from kdtrain.errors import UsageError, as_number
from kdtrain.models.output_head import HeadPart
from kdtrain.objective.alpha import Alpha, MeasuredAlpha
from kdtrain.objective.divergence import parse, refuse
from kdtrain.objective.engine.fused import Request, fused_loss
from kdtrain.objective.metrics import by_kind
from kdtrain.objective.statistics import Events, Statistics
from kdtrain.objective.targets import Supervision, Targets, per_token, scalar
from kdtrain.objective.temperature import Temperature

if TYPE_CHECKING:
    from kdtrain.objective.engine.dense import DenseStatistics


class LossOutput(NamedTuple):
    """A loss to differentiate, and sums over unmasked tokens as detached scalars on the device."""

    loss: Tensor
    """Scalar: the sums below, weighted and divided by the normalizer."""
    ce: Tensor
    """Sum of -log q(label) at T = 1, nats."""
    kd: Tensor
    """Sum of the divergence at T, nats, without the factor T^2; 0 without targets or at alpha 0."""
    kd_at_one: Tensor
    """Sum of the divergence alone at T = 1, nats; 0 without targets, at a fixed alpha of 0, or without `at_one`."""
    hidden: Tensor
    """Sum of the hidden-state loss (`objective.hidden`), which the student adds; 0 here."""
    router: Tensor
    """The router's loss of a mixture of experts times the tokens, which the student adds; 0 here."""
    tokens: Tensor
    """Number of unmasked tokens."""
    ce_alone: Tensor
    """The part of `ce` over rows without a teacher in a mixture, whose weight is 1 and not 1 - alpha; else 0."""
    ce_written: Tensor
    kd_written: Tensor
    """The parts of `ce` and `kd` over text that a student wrote, where alpha is 1; else 0."""
    teacher_ce: Tensor
    """Sum of the teacher's -log p(label) at T = 1, nats; 0 without targets, at alpha 0, or dense without `at_one`."""
    members: Tensor
    """[M, 6] fp64 where each member of a mixture has an alpha (`objective.alpha`), else [0, 6]: of each, or of the one
    data set, the sums of ce, kd and teacher_ce over rows with a teacher, the number of these rows, and where the
    teacher has another tokenizer the bytes of their labels, and of those that teacher_ce is over; else 0."""


def joined(ce: Tensor, kd: Tensor, alpha: Tensor | float, kd_weight: Tensor | float) -> Tensor:
    """Return (1 - alpha) CE + alpha T^2 KD, given kd_weight = alpha T^2."""
    return (1.0 - alpha) * ce + kd_weight * kd


class DistillationLoss(nn.Module):
    """The distillation loss and its temperature, which may be learnable.

    Args:
        divergence, tail: as `--divergence` (a name, or as jsd:0.3 with its number) and `--tail` take them.
        alpha: weight of the distillation term, 0 to 1, or a module of `objective.alpha`, or `auto`: by withheld text
            that `Student.measure` is given, and 0.9 until then.
        temperature: T > 0, or a module of `objective.temperature`.
    Raises:
        UsageError: there is no such divergence or tail rule, or alpha or the temperature is out of range.

    >>> loss = DistillationLoss(divergence="forward-kl", temperature=2.0)
    >>> loss.temperature.value()
    tensor(2.)
    """

    def __init__(
        self,
        *,
        divergence: str = "forward-kl",
        alpha: Alpha | float | Literal["auto"] = "auto",
        tail: str = "ghost",
        temperature: Temperature | float = 1.0,
    ) -> None:
        super().__init__()
        parse(divergence)
        TAILS.get(tail)
        self.divergence, self.tail = divergence, tail
        if not isinstance(alpha, Alpha):
            alpha = MeasuredAlpha() if alpha == "auto" else Alpha(alpha)
        self.alpha = alpha
        self.byte_lengths: Tensor | None = None
        """Bytes of each token, where the teacher has another tokenizer: alpha then compares losses of the same text."""
        if not isinstance(temperature, Temperature):
            temperature = Temperature(as_number(temperature, "--temperature"))
        self.temperature = temperature

    def forward(
        self,
        hidden_ND: Tensor,
        head: HeadPart,
        labels_N: Tensor,
        mask_N: Tensor,
        targets: Targets | None,
        *,
        vocab_size: int,
        normalizer: Tensor | float,
        compile: bool = False,
    ) -> LossOutput:
        """Compute `distillation_loss` at the present alpha and temperature; a learned one's own loss adds its gradient.

        UsageError: there are no targets, and alpha is not 0; or these are right at T = 1 only, and the temperature is
            another one.
        """
        weights = self.alpha.value()
        if targets is None and (isinstance(weights, Tensor) or weights != 0):
            given = "auto" if isinstance(weights, Tensor) else weights
            raise UsageError(
                f"the batch has no targets of a teacher, and --alpha is {given}: give batches of a teacher's "
                "cache (a collator may have dropped their tensors), or --alpha 0, which is plain cross-entropy"
            )
        options = {"vocab_size": vocab_size, "normalizer": normalizer, "compile": compile}
        rows = Supervision(labels_N, mask_N, targets)
        if targets is None or not targets.parts:
            output = self._of_one_kind(hidden_ND, head, rows, weights, 0, **options)
        else:
            # once: ranks whose micro-batches have other numbers of parts gather a sharded head together
            head = head.gathered()
            outputs = []
            members = targets.members or (0,) * len(targets.parts)
            for (part, own), member in zip(by_kind(rows), members, strict=True):
                one = self._of_one_kind(hidden_ND[part], head, own, weights, member, **options)
                outputs.append(one if own.targets is not None else one._replace(ce_alone=one.ce))
            output = LossOutput(*(torch.stack(each).sum(0) for each in zip(*outputs, strict=True)))
        if isinstance(self.alpha, MeasuredAlpha) and self.alpha.by_forward and self.training:
            self.alpha.follow(output.members)
        return output

    def _of_one_kind(
        self, hidden_RD: Tensor, head: HeadPart, rows: Supervision, weights: Any, member: int, **options: Any
    ) -> LossOutput:
        """Compute the loss of rows whose targets are all of one kind and of one member."""
        targets = rows.targets
        if targets is not None and targets.only_at_one and not self.temperature.stays_one:
            _refuse_across(targets)
            raise UsageError(
                "samples without a top-k are right at T = 1 only; use a --temperature of 1, or a cache with a --top-k"
            )
        written = targets is not None and targets.policy is not None  # what a student wrote is no label
        alpha = weights[member] if isinstance(weights, Tensor) else weights
        output = distillation_loss(
            hidden_RD,
            head,
            rows.labels,
            rows.mask,
            targets,
            temperature=1.0 if self.temperature.stays_one else self.temperature.value(),
            alpha=1.0 if written else alpha,
            divergence=self.divergence,
            tail=self.tail,
            **options,
        )
        if written:
            output = output._replace(ce_written=output.ce, kd_written=output.kd)
        if isinstance(weights, Tensor):
            sums = [output.ce, output.kd, output.teacher_ce, output.tokens, *[torch.zeros_like(output.ce)] * 2]
            if targets is not None and targets.forward_only and (sizes := self.byte_lengths) is not None:
                sizes_R = sizes[rows.labels.clamp(0, len(sizes) - 1)]
                sums[4:] = (x.masked_fill(~rows.mask, 0.0).sum() for x in (sizes_R, targets.label_bytes(sizes_R)))
            found = torch.zeros(len(weights), 6, dtype=torch.float64, device=output.ce.device)
            if (
                targets is not None or len(found) > 1
            ) and not written:  # of rows without a teacher only a member of its own counts
                found[member] = torch.stack([each.double() for each in sums])
            output = output._replace(members=found)
        normalizer = options["normalizer"]
        extra = self.temperature.auxiliary_loss(targets, rows.mask, normalizer)
        # Its gradient only: the value stays that of the distillation loss.
        return output if extra is None else output._replace(loss=output.loss + (extra - extra.detach()))


def distillation_loss(
    hidden_ND: Tensor,
    head: HeadPart,
    labels_N: Tensor,
    mask_N: Tensor,
    targets: Targets | None,
    *,
    temperature: Tensor | float,
    alpha: Tensor | float,
    divergence: str = "forward-kl",
    tail: str = "ghost",
    vocab_size: int,
    normalizer: Tensor | float,
    at_one: bool = True,
    compile: bool = False,
    chunk: int | None = None,
) -> LossOutput:
    """Compute the loss of N tokens, differentiable once in hidden, the head's weight and bias, and the temperature.

    Args:
        hidden_ND: the student's hidden states in any float dtype ([N,P] logits if the head has no weight).
        head: the output head (weight [P,D], bias [P], scale, softcap).
        labels_N: int64 next tokens; any number where masked.
        mask_N: bool, True where the token counts. Targets of other rows may hold anything, NaN included.
        targets: the teacher's N rows, on hidden's device.
        temperature: scalar T > 0; a number 1 saves what a tensor on a GPU costs, whose value the host does not know.
        alpha: weight of the distillation term, 0 to 1; a scalar tensor is not read, and the term computed at 0 too.
        divergence, tail: as `--divergence` (a name, or as jsd:0.3 with its number) and `--tail` take them.
        vocab_size: V; columns of the head from V on are padding.
        normalizer: unmasked tokens of the whole step.
        at_one: measure the divergence at T = 1 too; with dense targets this is one more pass over the logits.
        compile: torch.compile the elementwise work.
        chunk: rows of a chunk, instead of the engine's own choice.
    Raises:
        UsageError: divergence, tail rule and kind of targets do not fit together, dense targets have another
            vocabulary, a tensor has another shape or dtype than these, or a number is out of range.
    """
    _check_inputs(hidden_ND, head, labels_N, mask_N, targets, vocab_size)
    # Tensors are not read, which would wait for a GPU.
    if not isinstance(alpha, Tensor) and not 0 <= alpha <= 1:
        raise UsageError(f"--alpha {alpha} is not between 0 and 1")
    if not isinstance(temperature, Tensor) and not 0 < temperature < math.inf:
        raise UsageError(f"--temperature {temperature} is not above 0")
    if not isinstance(normalizer, Tensor) and not 0 <= normalizer < math.inf:
        raise UsageError(f"normalizer {normalizer} is not a number of tokens")
    targets = targets if isinstance(alpha, Tensor) or alpha else None
    if targets is not None:
        _check(targets, divergence, tail, vocab_size)
        if not isinstance(temperature, Tensor) and temperature != 1:
            _refuse_across(targets)
    name, parameter = parse(divergence)
    recipe = _Recipe(
        alpha=scalar(alpha if targets is not None else 0.0, hidden_ND.device, torch.float64),
        divergence=name,
        parameter=parameter,
        tail=tail if targets is None else resolve_tail(tail, targets.num_samples),
        normalizer=scalar(normalizer, hidden_ND.device),
        at_one=at_one,
    )
    request = Request(
        head=head,
        rows=Supervision(labels_N, mask_N, targets),
        loss=recipe.sparse if targets is None or targets.width is None else recipe.dense,
        divergence=(name, parameter),
        sums=4,
        vocab_size=vocab_size,
        at_one=at_one,
        stays_one=not isinstance(temperature, Tensor) and temperature == 1,
        compile=compile,
        chunk=chunk or 0,
    )
    loss, sums = fused_loss(hidden_ND, 1.0 / scalar(temperature, hidden_ND.device), request)
    none = torch.zeros_like(sums[0])
    ce, kd, at_one_sum, teacher_ce = sums
    members = sums.new_zeros(0, 6, dtype=torch.float64)
    return LossOutput(loss, ce, kd, at_one_sum, none, none, mask_N.sum(), none, none, none, teacher_ce, members)


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """The two small functions that the engine differentiates, chunk by chunk.

    What may change from step to step is a tensor: a number would be compiled into them anew.
    """

    alpha: Tensor
    divergence: str
    parameter: float
    tail: str
    normalizer: Tensor
    at_one: bool

    def sparse(self, statistics: Statistics, beta: Tensor, rows: Supervision) -> tuple[Tensor, Tensor]:
        cross_entropy_R = statistics.lse - statistics.label
        if rows.targets is None:
            return self._joined(beta, rows.mask, cross_entropy_R, None, None, None)
        divergence = DIVERGENCES.get(self.divergence)
        label_R = rows.targets.label_logprob
        if divergence.of_label is not None:
            kd_R = divergence.of_label(statistics, rows)
            return self._joined(beta, rows.mask, cross_entropy_R, kd_R, kd_R.detach(), label_R)

        def measure(events: Events) -> Tensor:
            return divergence.of(events, self.parameter)  # type: ignore[no-any-return]

        kd_R, alone_R = rows.targets.measured(measure, self.tail, statistics, beta)
        if not self.at_one or rows.targets.known_at_one:
            return self._joined(beta, rows.mask, cross_entropy_R, kd_R, alone_R if self.at_one else None, label_R)
        with torch.no_grad():
            events = rows.targets.at_one().events(self.tail, statistics.at_one(), torch.ones_like(beta))
            at_one_R = measure(events)
        return self._joined(beta, rows.mask, cross_entropy_R, kd_R, at_one_R, label_R)

    def dense(self, statistics: DenseStatistics, beta: Tensor, rows: Supervision) -> tuple[Tensor, Tensor]:
        cross_entropy_R = statistics.lse - statistics.label
        label_R = statistics.teacher_label if self.at_one else None
        values = statistics.divergence, statistics.divergence_at_one, label_R
        return self._joined(beta, rows.mask, cross_entropy_R, *values)

    def _joined(self, beta: Tensor, mask_R: Tensor, *values: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a chunk's loss and its sums, from CE, KD, KD at T = 1 and the teacher's log p(label), each [R]."""
        nothing = torch.zeros_like(beta)
        sums = [nothing if x is None else x.masked_fill(~mask_R, 0.0).sum() for x in values]
        total = joined(sums[0], sums[1], self.alpha, self.alpha / beta**2)
        return per_token(total, self.normalizer), torch.stack([*sums[:3], -sums[3]])


def _check_inputs(
    hidden_ND: Tensor, head: HeadPart, labels_N: Tensor, mask_N: Tensor, targets: Targets | None, vocab_size: int
) -> None:
    """Raise a UsageError if a tensor would fail far from here, or be read as something else. No value is looked at."""
    if hidden_ND.ndim != 2 or not hidden_ND.is_floating_point():
        raise UsageError(f"hidden_ND is {_described(hidden_ND)}; give floats [N, D]")
    rows, width = hidden_ND.shape
    for name, tensor, dtype in (("labels_N", labels_N, torch.int64), ("mask_N", mask_N, torch.bool)):
        if tensor.shape != (rows,) or tensor.dtype != dtype:
            raise UsageError(f"{name} is {_described(tensor)}; give {dtype} [{rows}], as many as hidden_ND has rows")
    if targets is not None and len(targets) != rows:
        raise UsageError(f"the targets have {len(targets)} rows, hidden_ND {rows}")
    size = width if head.weight is None else head.size or head.weight.shape[0]
    if not 1 <= vocab_size <= size:
        raise UsageError(f"vocab_size {vocab_size} is not between 1 and the head's {size} rows")
    if head.weight is not None and head.weight.shape[1] != width:
        raise UsageError(f"the head's weight is {_described(head.weight)}, hidden_ND {_described(hidden_ND)}")


def _refuse_across(targets: Targets) -> None:
    """Raise a UsageError, at a temperature other than 1, if the targets are of a teacher with another tokenizer."""
    if targets.forward_only:
        raise UsageError("across tokenizers the targets are right at T = 1 only; use a --temperature of 1")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _check(targets: Targets, divergence: str, tail: str, vocab_size: int) -> None:
    refuse(divergence, tail, top_k=targets.top_k, num_samples=targets.num_samples, dense=not targets.has_tail)
    entry = DIVERGENCES.get(parse(divergence)[0])
    if entry.of_label is not None and targets.policy is None:
        raise UsageError(
            f"--divergence {divergence} learns from tokens that the student drew, with its log p of them; train on "
            "rollouts (--on-policy, --rollouts), or use forward-kl"
        )
    if targets.forward_only and ("sampled" not in entry.accepts or tail != "ghost"):
        raise UsageError(
            f"--divergence {divergence} with --tail {tail} cannot be computed across tokenizers; use forward-kl, and "
            "leave --tail out"
        )
    if targets.width not in (None, vocab_size):
        raise UsageError(
            f"the dense targets have {targets.width} columns and the vocabulary has {vocab_size}; use a teacher "
            f"and a student of one tokenizer, and vocab_size={targets.width} if the student's head is padded"
        )
