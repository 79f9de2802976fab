"""Encoding a distribution of the teacher as a few numbers, and decoding these as targets.

`sparse` keeps, per token: the `top_k` most likely entries; `num_samples` samples from the rest
at T = 1 (each once, with its count: random-sampling KD, arXiv 2503.16870); the log-partition of the rest (the tail) at
a few knots of beta = 1/T with its slopes, so that any T between the knots is served; the log-probability of the true
next token; mean and standard deviation of the logits. `dense` keeps all log-probabilities in fp16, as the reference.
`tokens` keeps none: it serves training without a cached teacher. `compression` packs the numbers of `sparse` into few
bytes.

Samples are systematic (arXiv cs/0507025): their points in the cumulative distribution are a grid, 1/n apart, of which
only the place is left to chance. An entry of probability p in the tail is then drawn n p times, rounded down
or up, n p on average: estimates are unbiased as from independent draws, likely entries all but free of noise. The place
does not depend on n, so the n points halfway between those of a grid make it the grid of 2n: caches of samples add up.

Samples without a top-k serve T = 1 only, where their counts are all that a loss needs (`counts_only`): other
temperatures need weights p^(beta - 1), under which the samples of T = 1 are mostly noise.

The arithmetic is fp32 on the teacher's device (fp64 for the cumulative sums of sampling), a block of rows at a time,
so that memory does not grow with N x V. Samples come from numbers that the CPU makes from (seed, split, sequence):
they do not depend on batch size, ranks or restarts.

On a CPU a block stays in a core's cache, and plain operations give the same bits everywhere. On a GPU each of them
would be a pass over the memory: `_sparse_in_passes` reads the logits once for the largest entries and once for all
sums, in compiled functions; samples add one pass that reads and writes and one that reads. Both agree to rounding.

If only the most likely entries are known (`keep`), the rest of the vocabulary is one bucket, spread evenly. With n
entries outside the top-k and log p = e for each, L(beta) = log n + beta e: right at T = 1 only, as the manifest's range
states.

What it gives up: `dense` in fp16 errs by 4e-3 nats at log p = -10.

Shapes: B sequences, T positions, N = B*T tokens, V vocabulary, H top-k entries, D samples, K = H + D, G knots, C chunks
of W entries.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from kdtrain.cache.format.spec import (
    ABSENT,
    MOST_POINTS,
    CodecSpec,
)
from kdtrain.errors import UsageError
from kdtrain.objective.engine.matmul import maybe_compiled
from kdtrain.objective.targets import FLOOR, DenseTargets, SparseTargets, Targets

_Rows = Callable[..., Tensor]
_CELLS = {"cpu": 2**18, "cuda": 2**27}  # logits in a block: they stay in a core's cache, or fill a GPU


def uniforms(purpose: str, seed: int, split: str, sequence: int, length: int) -> np.ndarray:
    """Return int64 [length] in [0, 2**32), one number a position, from a hash of the arguments."""
    name = f"kdtrain {purpose} {seed} {split} {sequence}"
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(4 * length), "<u4").astype(np.int64)


def draw_points(
    seed: int, split: str, sequence: int, length: int, number: int, offset: Fraction = Fraction(0), start: int = 0
) -> np.ndarray:
    """Return fp64 [length - start, number] in [0, 1): places of samples in the cumulative distributions.

    The fractional parts of x + offset + i / number, with one x a position, a pure function of seed, split and sequence.
    They are exact quotients of whole numbers, correctly rounded: equal points of two grids are equal doubles.

    ValueError: the offset is too fine.
    """
    fine = math.lcm(number, offset.denominator)
    if fine > MOST_POINTS:
        raise ValueError(f"samples cannot be drawn {offset} beside a grid of {number}")
    places_D = (int(offset * fine) + np.arange(number) * (fine // number)) << 32
    chance_N1 = uniforms("grid", seed, split, sequence, length)[start:, None]
    return (fine * chance_N1 + places_D) % (fine << 32) / (fine << 32)


def _draw(weights_NV: Tensor, points_ND: Tensor) -> Tensor:
    """Draw samples [N, D] by the inverse CDF; V in a row without any weight. Never draws an entry of weight 0."""
    cdf_NV = weights_NV.cumsum(-1, dtype=torch.float64)
    total_N1 = cdf_NV[:, -1:]
    drawn_ND = torch.searchsorted(cdf_NV, points_ND * total_N1, right=True).clamp_(max=weights_NV.shape[1] - 1)
    # A parallel sum may step up by rounding at an entry of weight 0: such a draw moves to a neighbour with weight.
    bad_N = (weights_NV.gather(1, drawn_ND) == 0).any(-1)
    if bad_N.any():
        alive_NV = weights_NV[bad_N] > 0
        column_V = torch.arange(weights_NV.shape[1], device=weights_NV.device)
        moved_ND = torch.where(alive_NV, column_V, -1).cummax(-1).values.gather(1, drawn_ND[bad_N])
        drawn_ND[bad_N] = torch.where(moved_ND < 0, alive_NV.int().argmax(-1, keepdim=True), moved_ND)
    return drawn_ND.masked_fill_(~(total_N1 > 0), weights_NV.shape[1])


def _sampled(
    drawn_ND: Tensor, vocab_size: int, logprobs_at: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct drawn ids, their log p and counts [N, D], most likely first; then ABSENT, NaN and 0."""
    drawn_ND = drawn_ND.sort(-1).values
    new_ND = torch.ones_like(drawn_ND)
    new_ND[:, 1:] = drawn_ND[:, 1:] != drawn_ND[:, :-1]
    group_ND = new_ND.cumsum(-1) - 1
    # Distinct ids, ascending, and their counts; V and 0 in the columns left over.
    ids_ND = torch.full_like(drawn_ND, vocab_size).scatter_(1, group_ND, drawn_ND)
    counts_ND = torch.zeros_like(drawn_ND).scatter_add_(1, group_ND, (drawn_ND < vocab_size).long())
    kept_ND = logprobs_at(ids_ND.clamp(max=vocab_size - 1)).masked_fill_(counts_ND == 0, -torch.inf)
    order_ND = kept_ND.argsort(dim=-1, descending=True, stable=True)
    counts_ND = counts_ND.gather(1, order_ND)
    absent_ND = kept_ND.gather(1, order_ND).isneginf()
    ids_ND = ids_ND.gather(1, order_ND).masked_fill_(absent_ND, ABSENT)
    return ids_ND, kept_ND.gather(1, order_ND).masked_fill_(absent_ND, torch.nan), counts_ND


def _tail(offset_NV: Tensor, at_one_NV: Tensor, largest_N: Tensor, knots: tuple[float, ...]) -> Tensor:
    """Return [N, 2G]: L(beta) = log sum exp(beta log p) over the tail, then dL/dbeta = E[log p].

    `offset_NV` is log p less the tail's largest, FLOOR in the top-k: its weight is then exactly 0. `at_one_NV` is its
    exponential.
    """
    partitions, slopes = [], []
    for beta in knots:
        weights_NV = at_one_NV if beta == 1 else (offset_NV * beta).exp_()
        total_N = weights_NV.sum(-1)
        partitions.append(beta * largest_N + total_N.log())
        slopes.append(largest_N + torch.linalg.vecdot(weights_NV, offset_NV) / total_N)
    return torch.stack(partitions + slopes, -1)


def _moments(logprobs_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of log p over the possible entries."""
    if logprobs_NV.amin() > FLOOR:
        # On a CPU three times as fast as torch.std_mean.
        mean_N1 = logprobs_NV.mean(-1, keepdim=True)
        centred_NV = logprobs_NV - mean_N1
        return mean_N1[:, 0], (torch.linalg.vecdot(centred_NV, centred_NV) / logprobs_NV.shape[1]).sqrt()
    alive_NV = logprobs_NV > FLOOR
    number_N = alive_NV.sum(-1).clamp_(min=1)
    mean_N = logprobs_NV.masked_fill(~alive_NV, 0).sum(-1) / number_N
    square_N = (logprobs_NV - mean_N[:, None]).masked_fill(~alive_NV, 0).square().sum(-1)
    return mean_N, (square_N / number_N).sqrt()


def _sparse(logprobs_NV: Tensor, spec: CodecSpec, points_ND: Tensor | None) -> dict[str, Tensor]:
    top_k, vocab_size = spec.top_k, spec.vocab_size
    mean_N, std_N = _moments(logprobs_NV)
    if top_k:
        top_NJ, ids_NJ = logprobs_NV.topk(min(top_k + 1, vocab_size), -1)
    else:  # eight times as fast on a CPU
        top_NJ = logprobs_NV.amax(-1, keepdim=True)
        ids_NJ = torch.empty(len(logprobs_NV), 0, dtype=torch.int64, device=logprobs_NV.device)
    ids_NK, kept_NK = ids_NJ[:, :top_k], top_NJ[:, :top_k]
    parts = {"logit_mean": mean_N, "logit_std": std_N}
    if top_k == vocab_size:
        empty_NG = torch.zeros(len(logprobs_NV), len(spec.knots), device=logprobs_NV.device)
        parts["tail"] = torch.cat([empty_NG + FLOOR, empty_NG], -1)
        offset_NV = torch.full_like(logprobs_NV, FLOOR)
    else:
        largest_N = top_NJ[:, top_k]
        offset_NV = (logprobs_NV - largest_N[:, None]).scatter_(1, ids_NK, FLOOR)
        weights_NV = offset_NV.exp()
        parts["tail"] = _tail(offset_NV, weights_NV, largest_N, spec.knots)
    if spec.num_samples:
        assert points_ND is not None
        weights_NV = offset_NV.exp_().masked_fill_(logprobs_NV <= FLOOR, 0)
        found = _sampled(_draw(weights_NV, points_ND), vocab_size, lambda ids_ND: logprobs_NV.gather(1, ids_ND))
        ids_NK, kept_NK = torch.cat([ids_NK, found[0]], -1), torch.cat([kept_NK, found[1]], -1)
        parts["counts"] = F.pad(found[2], (top_k, 0))
    return {**parts, "ids": ids_NK, "logprobs": kept_NK}


def _encode_block(logits_NV: Tensor, labels_N: Tensor, spec: CodecSpec, points_ND: Tensor | None) -> dict[str, Tensor]:
    logits_NV = logits_NV.float()
    partition_N1 = logits_NV.logsumexp(-1, keepdim=True)
    logprobs_NV = (logits_NV - partition_N1).clamp_(min=FLOOR)
    label_N = logprobs_NV.gather(1, labels_N[:, None])[:, 0]
    return {**ARITHMETIC[spec.kind][0](logprobs_NV, spec, points_ND), "label_logprob": label_N}


_CHUNK = 64
_LOWEST = torch.finfo(torch.float32).min


def _chunk_maxima(logits_NV: Tensor) -> Tensor:
    """Return the largest logit of each chunk, fp32 [N, C]."""
    padded_NV = F.pad(logits_NV.float(), (0, -logits_NV.shape[1] % _CHUNK), value=-torch.inf)
    return padded_NV.unflatten(1, (-1, _CHUNK)).amax(-1)


def _largest(logits_NV: Tensor, maxima_NC: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the `number` largest logits, at least `_LOWEST`, and their ids, from as many chunks, by their maxima."""
    chunks_NJ = maxima_NC.topk(min(number, maxima_NC.shape[1]), -1).indices
    column_W = torch.arange(_CHUNK, device=logits_NV.device)
    ids_NI = rearrange(chunks_NJ[:, :, None] * _CHUNK + column_W, "n j w -> n (j w)")
    beyond_NI = ids_NI >= logits_NV.shape[1]
    values_NI = logits_NV.gather(1, ids_NI.masked_fill(beyond_NI, 0)).float().clamp_(min=_LOWEST)
    top = values_NI.masked_fill_(beyond_NI, -torch.inf).topk(number, -1)
    return top.values, ids_NI.gather(1, top.indices)


def _reduce(
    logits_NV: Tensor, highest_N1: Tensor, edge_N1: Tensor, knots: tuple[float, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute all sums over the logits z in one pass.

    With d = z - edge where d <= 0: the sums of exp(beta d) and of exp(beta d) d, both [N, G]. With h = z - highest for
    the possible entries: their number and the sums of h and h^2, each [N, 1].
    """
    wide_NV = logits_NV.float()
    offset_NV = wide_NV.maximum(highest_N1 + FLOOR) - edge_N1
    weights = [torch.where(offset_NV <= 0, (beta * offset_NV).exp(), 0.0) for beta in knots]
    sums_NG = torch.stack([weights_NV.sum(-1) for weights_NV in weights], -1)
    moments_NG = torch.stack([(weights_NV * offset_NV).sum(-1) for weights_NV in weights], -1)
    alive_NV = wide_NV - highest_N1 > FLOOR
    above_NV = torch.where(alive_NV, wide_NV - highest_N1, 0.0)
    total_N1, square_N1 = above_NV.sum(-1, keepdim=True), above_NV.square().sum(-1, keepdim=True)
    return sums_NG, moments_NG, alive_NV.float().sum(-1, keepdim=True), total_N1, square_N1


def _tail_weights(logits_NV: Tensor, highest_N1: Tensor, edge_N1: Tensor) -> Tensor:
    """Return exp(z - edge) of the possible entries up to the edge, else 0; fp32, V padded to whole chunks."""
    wide_NV = F.pad(logits_NV.float(), (0, -logits_NV.shape[1] % _CHUNK), value=-torch.inf)
    inside_NV = (wide_NV - highest_N1 > FLOOR) & (wide_NV <= edge_N1)
    return torch.where(inside_NV, (wide_NV - edge_N1).exp(), 0.0)


def _draw_by_chunk(weights_NV: Tensor, points_ND: Tensor, vocab_size: int) -> Tensor:
    """Draw as `_draw` does, first a chunk and then an entry of it, without cumulative sums over V."""
    weights_NCW = weights_NV.unflatten(1, (-1, _CHUNK))
    mass_NC = weights_NCW.sum(-1, dtype=torch.float64)
    drawn_ND = _draw(mass_NC, points_ND)
    chunk_ND = drawn_ND.clamp(max=mass_NC.shape[1] - 1)
    cdf_NC = mass_NC.cumsum(-1)
    own_ND = mass_NC.gather(1, chunk_ND)
    rest_ND = (points_ND * cdf_NC[:, -1:] - (cdf_NC.gather(1, chunk_ND) - own_ND)) / own_ND
    chosen = weights_NCW[torch.arange(len(chunk_ND), device=chunk_ND.device)[:, None], chunk_ND].flatten(0, 1)
    inside = _draw(chosen, rest_ND.nan_to_num(0.0).clamp(0, 1).reshape(-1, 1)).view_as(chunk_ND)
    return (chunk_ND * _CHUNK + inside).masked_fill_(drawn_ND == mass_NC.shape[1], vocab_size)


def _sparse_in_passes(
    logits_NV: Tensor, labels_N: Tensor, spec: CodecSpec, points_ND: Tensor | None, compile: bool = True
) -> dict[str, Tensor]:
    """Encode as `_encode_block` does, where no tail is empty, in as few passes over the logits as the parts need."""
    if not compile:
        return _in_passes(logits_NV, labels_N, spec, points_ND, compile)
    import torch._inductor.config as inductor_config  # takes two seconds

    # A compiler that times what it may choose could continue an interrupted build with other kernels.
    with inductor_config.patch(deterministic=True):
        return _in_passes(logits_NV, labels_N, spec, points_ND, compile)


def _in_passes(
    logits_NV: Tensor, labels_N: Tensor, spec: CodecSpec, points_ND: Tensor | None, compile: bool
) -> dict[str, Tensor]:
    top_k, knots = spec.top_k, spec.knots
    maxima_NC = maybe_compiled(_chunk_maxima, compile)(logits_NV)
    top_NJ, ids_NJ = _largest(logits_NV, maxima_NC, top_k + 1)
    top_NK, ids_NK = top_NJ[:, :top_k], ids_NJ[:, :top_k]
    highest_N1 = top_NJ[:, :1]
    edge_N1 = top_NJ[:, top_k:].maximum(highest_N1 + FLOOR)
    found = maybe_compiled(_reduce, compile)(logits_NV, highest_N1, edge_N1, knots)
    sums_NG, moments_NG, number_N1, total_N1, square_N1 = found
    # Top-k entries equal to the edge are in the sums too, each with weight 1.
    sums_NG = sums_NG - (top_NK <= edge_N1).sum(-1, keepdim=True)
    one = knots.index(1.0)
    partition_N1 = torch.cat([top_NK, edge_N1 + sums_NG[:, one, None].log()], -1).logsumexp(-1, keepdim=True)

    def logprobs_at(ids_NK: Tensor) -> Tensor:
        return (logits_NV.gather(1, ids_NK).float() - partition_N1).clamp_(min=FLOOR)

    largest_N1 = (edge_N1 - partition_N1).clamp_(min=FLOOR)
    values_NG = torch.cat([beta * largest_N1 for beta in knots], -1) + sums_NG.log()
    mean_N1 = total_N1 / number_N1
    parts = {
        "logit_mean": (highest_N1 - partition_N1 + mean_N1)[:, 0],
        "logit_std": (square_N1 / number_N1 - mean_N1.square()).clamp_(min=0).sqrt_()[:, 0],
        "tail": torch.cat([values_NG, largest_N1 + moments_NG / sums_NG], -1),
        "label_logprob": logprobs_at(labels_N[:, None])[:, 0],
    }
    kept_NK = logprobs_at(ids_NK)
    if spec.num_samples:
        assert points_ND is not None
        weights_NV = maybe_compiled(_tail_weights, compile)(logits_NV, highest_N1, edge_N1).scatter_(1, ids_NK, 0)
        drawn_ND = _draw_by_chunk(weights_NV, points_ND, spec.vocab_size)
        samples = _sampled(drawn_ND, spec.vocab_size, logprobs_at)
        ids_NK, kept_NK = torch.cat([ids_NK, samples[0]], -1), torch.cat([kept_NK, samples[1]], -1)
        parts["counts"] = F.pad(samples[2], (top_k, 0))
    return {**parts, "ids": ids_NK, "logprobs": kept_NK}


@torch.no_grad()
def encode(
    logits_NV: Tensor, labels_N: Tensor, spec: CodecSpec, points_ND: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Encode the distributions of N tokens: label_logprob [N]; logprobs [N, K] or, dense, [N, V]; ids, counts [N, K];
    tail [N, 2G]; logit_mean, logit_std [N]. fp32 (`dense`: fp16), ids in the spec's dtype, uint8 counts.

    logits_NV: any float dtype and device, each row with a finite log-partition; labels_N: int64, the true
    next tokens; points_ND: fp64 in [0, 1), `draw_points`, required with num_samples.
    """
    tensors = encode_on_device(logits_NV, labels_N, spec, points_ND)
    arrays = {name: values.cpu().numpy() for name, values in tensors.items()}
    if "ids" in arrays:
        arrays["ids"] = arrays["ids"].astype(spec.id_dtype)  # ABSENT wraps to the largest value of either dtype
    return arrays


@torch.no_grad()
def encode_on_device(
    logits_NV: Tensor,
    labels_N: Tensor,
    spec: CodecSpec,
    points_ND: np.ndarray | None = None,
    *,
    compile: bool = True,
    cells: int | None = None,
) -> dict[str, Tensor]:
    """Encode as `encode` does, on the device of the logits (`dense`: on the CPU); ids in int64, ABSENT among them.

    compile: on a GPU compile the passes. cells: logits in a block, by default what suits the device.
    """
    rows = max(1, (cells or _CELLS.get(logits_NV.device.type, 2**20)) // spec.vocab_size)
    in_passes = logits_NV.is_cuda and spec.coded and spec.top_k < spec.vocab_size
    if in_passes:
        rows = max(8, rows - rows % 8)  # compiled code copies inputs that do not begin at a multiple of 16 bytes
    blocks: dict[str, list[Tensor]] = {}
    for start in range(0, len(logits_NV), rows):
        part = slice(start, start + rows)
        chance = None if points_ND is None else torch.from_numpy(points_ND[part]).to(logits_NV.device)
        given = logits_NV[part], labels_N[part].to(logits_NV.device), spec, chance
        block = _sparse_in_passes(*given, compile) if in_passes else _encode_block(*given)
        for name, values in block.items():
            # Dense ones leave the device at once: they are as large as the logits. All others stay until the last
            # block, because each copy to the host waits for the device.
            if name == "counts":
                values = values.to(torch.uint8)
            elif name != "ids":
                values = values.to(torch.float32) if spec.coded else values.to(torch.float16).cpu()
            blocks.setdefault(name, []).append(values)
    return {name: torch.cat(parts) for name, parts in blocks.items()}


def encode_sequences(
    logits_BTV: Tensor,
    labels_BT: Tensor,
    spec: CodecSpec,
    *,
    seed: int,
    split: str,
    first: int,
    offset: Fraction = Fraction(0),
) -> dict[str, np.ndarray]:
    """Encode whole sequences of `split`, from number `first` on, by `encode`; return arrays [B, T, ...].

    offset: of the grid of samples, see `draw_points`.

    `broken` [B] marks sequences with a non-finite logit (NaN, +inf, or a position with only -inf): they are encoded as
    if every token were equally likely, and the caller masks them out.
    """
    size, length = labels_BT.shape
    chance = None
    if spec.num_samples:
        rows = range(first, first + size)
        chance = np.concatenate([draw_points(seed, split, row, length, spec.num_samples, offset) for row in rows])
    broken_B = broken(logits_BTV)
    if broken_B.any():
        logits_BTV = logits_BTV.masked_fill(broken_B[:, None, None], 0.0)
    flat = encode(rearrange(logits_BTV, "b t v -> (b t) v"), rearrange(labels_BT, "b t -> (b t)"), spec, chance)
    arrays = {name: rearrange(values, "(b t) ... -> b t ...", b=size) for name, values in flat.items()}
    return {**arrays, "broken": broken_B.cpu().numpy()}


def broken(logits_BTV: Tensor) -> Tensor:
    """Return bool [B]: True for a sequence with a position that has no distribution (NaN, +inf or only -inf)."""
    # Exactly then the largest logit is NaN or infinite; this is one pass over the logits.
    return ~logits_BTV.amax(-1).isfinite().all(-1)


def decode(arrays: dict[str, np.ndarray], spec: CodecSpec) -> Targets | None:
    """Return the targets of arrays [n, T, ...] from `encode_sequences` or `compression.unpack`, as N = n*T rows.

    None for the codec `tokens`.
    """
    if not spec.taught:
        return None

    def rows(name: str, dtype: type = np.float32) -> Tensor:
        flat = rearrange(arrays[name], "n t ... -> (n t) ...")
        return torch.from_numpy(flat.astype(dtype, copy=False))

    targets: Any = ARITHMETIC[spec.kind][1](rows, spec)
    return replace(targets, policy=rows(spec.POLICY)) if spec.written else targets


def _decode_sparse(rows: _Rows, spec: CodecSpec) -> SparseTargets:
    ids_NK, logprobs_NK = rows("ids", np.int64), rows("logprobs")
    if spec.num_samples:
        absent_NK = ids_NK == spec.absent
        ids_NK.masked_fill_(absent_NK, ABSENT)
        logprobs_NK.masked_fill_(absent_NK, FLOOR)
    return SparseTargets(
        ids=ids_NK,
        logprobs=logprobs_NK,
        counts=rows("counts") if spec.num_samples else logprobs_NK.new_zeros(()).expand(logprobs_NK.shape),
        tail=rows("tail"),
        label_logprob=rows("label_logprob"),
        logit_mean=rows("logit_mean"),
        logit_std=rows("logit_std"),
        top_k=spec.top_k,
        num_samples=spec.num_samples,
        knots=spec.knots,
    )


ARITHMETIC: dict[str, tuple[Callable[..., dict[str, Tensor]], Callable[[_Rows, CodecSpec], Targets]]] = {
    "sparse": (_sparse, _decode_sparse),
    "dense": (
        lambda logprobs_NV, *_: {"logprobs": logprobs_NV},
        lambda rows, spec: DenseTargets(logprobs=rows("logprobs", np.float16), label_logprob=rows("label_logprob")),
    ),
}
"""Of each codec that keeps anything of a teacher: what it keeps of log-probabilities [N, V], and targets of that."""

_LEAST_MASS = 1e-6


def keep(ids_TH: np.ndarray, logprobs_TH: np.ndarray, label_T: np.ndarray, spec: CodecSpec) -> dict[str, np.ndarray]:
    """Return the arrays of `encode` for one sequence, from its top-k alone, most likely first.

    A position with NaN counts as an even distribution; a label with NaN gets its share of the bucket.

    UsageError: an id beyond the vocabulary.
    """
    if ids_TH.max() >= spec.vocab_size:
        raise UsageError(f"the entries have the id {ids_TH.max()}, the teacher's vocabulary only {spec.vocab_size}")
    logprobs_TH = np.where(np.isnan(logprobs_TH), -np.log(spec.vocab_size), logprobs_TH).clip(FLOOR, 0)
    rest = spec.vocab_size - spec.top_k
    mass_T = (1 - np.exp(logprobs_TH).sum(-1)).clip(min=_LEAST_MASS)
    each_T = np.log(mass_T / max(1, rest))
    knots = np.array(spec.knots)
    values_TG = np.log(max(1, rest)) + knots * each_T[:, None] if rest else np.full((len(each_T), len(knots)), FLOOR)
    slopes_TG = np.repeat(each_T[:, None] if rest else np.zeros_like(each_T)[:, None], len(knots), 1)
    mean_T = (logprobs_TH.sum(-1) + rest * each_T) / spec.vocab_size
    square_T = (np.square(logprobs_TH).sum(-1) + rest * np.square(each_T)) / spec.vocab_size
    kept = {
        "logprobs": logprobs_TH,
        "tail": np.concatenate([values_TG, slopes_TG], -1),
        "label_logprob": np.where(np.isnan(label_T), each_T, label_T),
        "logit_mean": mean_T,
        "logit_std": np.sqrt((square_T - np.square(mean_T)).clip(min=0)),
    }
    arrays = {name: values.astype(np.float32) for name, values in kept.items()}
    return {**arrays, "ids": ids_TH.astype(spec.id_dtype)}
