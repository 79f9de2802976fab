"""An independent fp64 reference of the objective: all logits at once, plain autograd, none of the engine."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.targets import DenseTargets, SparseTargets

KNOTS = (1.5, 1.0, 0.7, 0.5, 0.25)


@dataclass
class Problem:
    """A small student and its teacher; `energies` [N,V] are the teacher's log p in fp64."""

    hidden: Tensor
    head: HeadPart
    labels: Tensor
    mask: Tensor
    energies: Tensor
    vocab_size: int

    def cast(self, dtype: torch.dtype) -> "Problem":
        """Copy the problem in `dtype`, with new leaves as tensors."""

        def leaf(x):
            return None if x is None else x.detach().to(dtype).clone().requires_grad_()

        head = HeadPart(leaf(self.head.weight), leaf(self.head.bias), self.head.scale, self.head.softcap)
        return Problem(leaf(self.hidden), head, self.labels, self.mask, self.energies, self.vocab_size)

    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.head.weight, self.head.bias) if x is not None]

    def logits(self) -> Tensor:
        u = self.hidden if self.head.weight is None else self.hidden @ self.head.weight.T
        u = u if self.head.bias is None else u + self.head.bias
        u = (u * self.head.scale)[:, : self.vocab_size]
        return u if self.head.softcap is None else self.head.softcap * torch.tanh(u / self.head.softcap)


def problem(n=24, d=6, vocab=23, padding=0, bias=False, scale=1.0, softcap=None, seed=0, peak=2.0, size=1.5) -> Problem:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    # Rounded to fp32, so that fp32 and fp64 see the same numbers.
    hidden, weight = (normal(n, d).float().double(), (size * normal(vocab + padding, d) / d**0.5).float().double())
    head = HeadPart(weight, normal(vocab + padding).float().double() if bias else None, scale, softcap)
    energies = torch.log_softmax(peak * normal(n, vocab), -1)
    labels = torch.randint(vocab, (n,), generator=g)
    mask = torch.rand(n, generator=g) > 0.3
    mask[0] = True
    return Problem(hidden, head, labels, mask, energies, vocab)


def sparse(
    energies, labels, top_k, num_samples=0, kept=None, knots=KNOTS, seed=0, dtype=torch.float64
) -> SparseTargets:
    """Make the targets that a cache would hold of `energies` [N,V], unrounded; absent entries carry id V + 7."""
    n, vocab = energies.shape
    order = energies.argsort(-1, descending=True)
    ids = order[:, :top_k]
    rest = energies.scatter(1, ids, -torch.inf)
    values = torch.stack([torch.logsumexp(b * rest, -1) for b in knots], -1)
    slopes = torch.stack([(torch.softmax(b * rest, -1) * energies).sum(-1) for b in knots], -1)
    counts = torch.zeros(n, top_k, dtype=torch.float64)
    if num_samples:
        g = torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(torch.softmax(rest, -1), num_samples, replacement=True, generator=g)
        all_counts = torch.zeros(n, vocab, dtype=torch.float64).scatter_add_(1, drawn, torch.ones_like(drawn).double())
        width = min(num_samples, vocab) if kept is None else kept
        top, where = all_counts.topk(width, dim=-1)
        ids = torch.cat([ids, where.masked_fill(top == 0, vocab + 7)], -1)
        counts = torch.cat([counts, top], -1)
    logprobs = energies.gather(1, ids.clamp(max=vocab - 1)).masked_fill(ids >= vocab, 3.0)
    return SparseTargets(
        ids=ids,
        logprobs=logprobs.to(dtype),
        counts=counts.to(dtype),
        tail=torch.cat([values, slopes], -1).to(dtype),
        label_logprob=energies.gather(1, labels[:, None]).squeeze(1).to(dtype),
        logit_mean=energies.mean(-1).to(dtype),
        logit_std=energies.std(-1).to(dtype),
        top_k=top_k,
        num_samples=num_samples,
        knots=knots,
    )


def dense(energies, labels, dtype=torch.float64) -> DenseTargets:
    return DenseTargets(energies.to(dtype), energies.gather(1, labels[:, None]).squeeze(1).to(dtype))


DISTANCES = {
    "forward-kl": lambda p, q, _: (p * (p / q).log()).sum(-1),
    "reverse-kl": lambda p, q, _: (q * (q / p).log()).sum(-1),
    "jsd": lambda p, q, b: _jsd(p, q, b),
    "skew-kl": lambda p, q, a: (p * (p / (a * p + (1 - a) * q)).log()).sum(-1),
    "skew-reverse-kl": lambda p, q, a: (q * (q / ((1 - a) * p + a * q)).log()).sum(-1),
    "tvd": lambda p, q, _: (p - q).abs().sum(-1) / 2,
    "logit-mse": lambda p, q, _: (p.log() - q.log()).var(-1, correction=0),
}
"""Each divergence a row, of probabilities [N,E] and its parameter, as its source writes it."""


def _jsd(p, q, b):
    m = b * p + (1 - b) * q
    return b * (p * (p / m).log()).sum(-1) + (1 - b) * (q * (q / m).log()).sum(-1)


def reference_kd(logits, energies, beta, rule, targets=None, divergence="forward-kl", parameter=0.3) -> Tensor:
    """Compute KD a token [N] from all logits; the teacher's log Z is the exact one, differentiated in beta too."""
    log_p, log_q = torch.log_softmax(beta * energies, -1), torch.log_softmax(beta * logits, -1)
    if rule == "sampled":
        assert divergence == "forward-kl"
        return (_sampled_weights(energies, log_p, targets) * (log_p - log_q)).sum(-1)
    if rule == "control-variate":
        assert divergence == "forward-kl"
        share = torch.exp(-4 * _distance_at_one(logits, energies, targets).detach())[:, None]
        return _control_variate(energies, log_p.exp(), log_q.exp(), targets, share)
    return DISTANCES[divergence](*_events(log_p.exp(), log_q.exp(), rule, targets), parameter)


def _events(p, q, rule, targets):
    """Return the probabilities of the same events under both sides."""
    if rule == "dense":
        return p, q
    ids = targets.ids[:, : targets.top_k]
    outside = torch.ones_like(p).scatter(1, ids, 0.0)
    p_tail, q_tail = ((x * outside).sum(-1, keepdim=True) for x in (p, q))
    p, q = p.gather(1, ids), q.gather(1, ids)
    if rule == "renormalize":
        return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return (p, q) if rule == "drop" else (torch.cat([p, p_tail], -1), torch.cat([q, q_tail], -1))


def _sampled_weights(energies, log_p, targets):
    vocab = energies.shape[1]
    weight = torch.zeros_like(energies)
    in_top_k = torch.zeros_like(energies).scatter(1, targets.ids[:, : targets.top_k], 1.0)
    tail_mass = (energies.exp() * (1 - in_top_k)).sum(-1, keepdim=True)
    for k in range(targets.top_k, targets.ids.shape[1]):
        share = targets.counts[:, k : k + 1].to(weight.dtype) / targets.num_samples
        one = torch.nn.functional.one_hot(targets.ids[:, k].clamp(max=vocab - 1), vocab) * share
        weight = weight + one * (targets.ids[:, k : k + 1] < vocab)
    return weight * tail_mass * torch.exp(log_p - energies) + in_top_k * log_p.exp()


def drawn_counts(targets, vocab):
    """Count the samples of each entry, [N,V]."""
    counts = torch.zeros(len(targets.ids), vocab + 1, dtype=torch.float64)
    places = targets.ids[:, targets.top_k :].clamp(max=vocab)
    return counts.scatter_add(1, places, targets.counts[:, targets.top_k :].double())[:, :vocab]


def _distance_at_one(logits, energies, targets):
    """Compute the KL over top-k and bucket at T = 1."""
    p, q = torch.softmax(energies, -1), torch.softmax(logits, -1)
    return DISTANCES["forward-kl"](*_events(p, q, "ghost", targets), None)


def _control_variate(energies, p, q, targets, share):
    """Sum the KL over top-k and bucket, and the bounded, weighted terms of the KL inside the tail, over all tokens."""
    inside = torch.ones_like(p).scatter(1, targets.ids[:, : targets.top_k], 0.0)
    p_tail, q_tail = ((x * inside).sum(-1, keepdim=True) for x in (p, q))
    chance = energies.exp() * inside / (energies.exp() * inside).sum(-1, keepdim=True)
    x = p_tail * q / q_tail / p
    term = share * torch.where(x <= 4, x - 1, 3 + 4 * (x / 4).log()) - x.log()
    drawn = drawn_counts(targets, p.shape[1]) / targets.num_samples
    bounded = (p / p_tail / chance.masked_fill(inside == 0, 1.0)).clamp(max=targets.num_samples**0.5)
    head = ((p * (p / q).log()) * (1 - inside)).sum(-1)
    bucket = p_tail * (p_tail / q_tail).log()
    return head + bucket[:, 0] + (drawn * bounded * p_tail * term).sum(-1)


def reference_loss(
    p: Problem, temperature, alpha, rule, targets, normalizer, divergence="forward-kl", parameter=0.3
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss and the sums of CE and of KD at T."""
    logits = p.logits()
    ce = -torch.log_softmax(logits, -1).gather(1, p.labels[:, None]).squeeze(1)
    kd = torch.zeros_like(ce)
    if alpha:
        kd = reference_kd(logits, p.energies, 1 / temperature, rule, targets, divergence, parameter)
    ce, kd = ce[p.mask].sum(), kd[p.mask].sum()
    return ((1 - alpha) * ce + alpha * temperature**2 * kd) / normalizer, ce, kd
