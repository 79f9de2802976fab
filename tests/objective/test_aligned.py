"""Targets of another tokenizer: against enumeration, against autograd, and against the ordinary objective."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from objective_cases import run, targets_for
from objective_reference import problem, sparse

from kdtrain.data.bytes import TokenBytes
from kdtrain.data.spelling import Spelling
from kdtrain.errors import UsageError
from kdtrain.models.output_head import HeadPart
from kdtrain.objective.cells import CellIndex
from kdtrain.objective.loss import DistillationLoss, distillation_loss
from kdtrain.objective.metrics import measure
from kdtrain.objective.targets import FLOOR, DenseTargets, SparseTargets, Supervision
from kdtrain.tokenizers import teacher_cells
from kdtrain.tokenizers.cells import Cells, prefix_cells
from kdtrain.tokenizers.targets import AlignedTargets
from kdtrain.tokenizers.teacher_cells import TeacherCells, coarsened, condensed
from kdtrain.tokenizers.transcode import holders

TEACHER = ["a", "b", "ab", "ba", "bb", "aab"]
STUDENT = ["b", "a", "aa", "ab", "bab", "abb"]
BYTES = ["a", "b"]
TEXTS = ["".join(each) for size in range(1, 5) for each in itertools.product("ab", repeat=size)]


def loss_of(logits, targets, labels, chunk=None):
    """Sum the loss over all rows of logits, every one of which counts."""
    mask = torch.ones(len(logits), dtype=torch.bool)
    options = {"temperature": 1.0, "alpha": 1.0, "vocab_size": logits.shape[1], "normalizer": 1.0, "chunk": chunk}
    return distillation_loss(logits, HeadPart(), labels, mask, targets, **options).loss


def token_bytes(vocabulary):
    flat = np.frombuffer("".join(vocabulary).encode(), np.uint8)
    starts = np.cumsum([0, *map(len, vocabulary)]).astype(np.int64)
    return TokenBytes("it", flat, starts, np.zeros(len(vocabulary), bool))


def cells_of(of_token):
    """Make cells of a teacher within whose tokens nothing is known."""
    size, one = len(of_token), np.zeros(1, np.int64)
    spelling = Spelling(np.arange(size + 1) // size, one, size)
    return TeacherCells.of(Cells(of_token.numpy(), one, int(of_token.max()) + 1), spelling)


def over(targets, of_token, source):
    """Coarsen targets at boundaries."""
    return coarsened(targets, cells_of(of_token), source, source * 0)


def greedy(text, vocabulary):
    tokens = []
    while text:
        best = max((each for each in vocabulary if text.startswith(each)), key=len)
        tokens.append(vocabulary.index(best))
        text = text[len(best) :]
    return tokens


def log_softmax_at(text, size, seed):
    """Compute a model's log p of each token after a text."""
    state = np.random.RandomState([seed, *text.encode(), len(text)])
    return torch.log_softmax(torch.from_numpy(2 * state.randn(size)), 0)


def positions(vocabulary):
    """List every position of all texts: number of the text, the text before it, and its label."""
    found = []
    for number, text in enumerate(TEXTS):
        before = ""
        for token in greedy(text, vocabulary):
            found.append((number, before, token))
            before += vocabulary[token]
    return found


def whole(energies, labels):
    """Make targets that keep all six entries, with an empty tail as a cache states it."""
    found = sparse(energies, labels, top_k=6, dtype=torch.float64)
    return found.map(lambda name, each: each.nan_to_num(neginf=FLOOR) if name == "tail" else each)


def drawn_targets(ids, logprobs, counts, samples, tail=None, top_k=0):
    """Make targets of samples, beside a top-k or alone, whose other numbers are 0."""
    none = torch.zeros(len(ids), dtype=logprobs.dtype)
    tail = none[:, None].expand(-1, 2) if tail is None else tail
    return SparseTargets(ids, logprobs, counts, tail, none, none, none, top_k=top_k, num_samples=samples, knots=(1.0,))


def aligned(near, compared, cells=None):
    return AlignedTargets(near, compared, near.label_logprob * 0, cells)


def brute_force(student, cell_of, wide, cut):
    """Compute the cells' term of all texts from the definitions, and find where cells are known.

    student: logits [N,V]. cut: where it is given, cells are also known of tokens within one of the teacher's.
    """
    theirs, own = positions(TEACHER), positions(wide)
    q = torch.log_softmax(student, 1)
    cells = torch.zeros((), dtype=torch.float64)
    compared = torch.zeros(len(own), dtype=torch.bool)
    for number in range(len(TEXTS)):
        begins_T = {len(each[1]): place for place, each in enumerate(theirs) if each[0] == number}
        begins_S = {len(each[1]): place for place, each in enumerate(own) if each[0] == number}
        common = sorted(begins_T.keys() & begins_S.keys())
        for start in begins_S if cut else common:
            begin = max(each for each in begins_T if each <= start)
            if begin not in common:
                continue
            prefix = [own[begins_S[each]][2] for each in sorted(begins_S) if begin <= each < start]
            p = log_softmax_at(theirs[begins_T[begin]][1], 6, 1).exp()
            rest = dict(enumerate(TEACHER))
            if prefix:
                spelled = {n: cut([each])[0] for n, each in rest.items()}
                going = {n: each for n, each in spelled.items() if each[: len(prefix)] == prefix != each}
                rest = {n: wide[each[len(prefix)]] for n, each in going.items()}
            compared[begins_S[start]] = bool(rest)
            for cell in {cell_of(each) for each in rest.values()}:
                mass_p = sum(p[n] for n, each in rest.items() if cell_of(each) == cell) / sum(p[n] for n in rest)
                mass_q = sum(q[begins_S[start], n].exp() for n, each in enumerate(wide) if cell_of(each) == cell)
                cells = cells + mass_p * (mass_p / mass_q).log()
    return cells, compared


def aligned_of_texts(wide, cut, inside):
    """Align the targets of all texts by the library's passes: a top-k, or whole distributions, also within tokens."""
    theirs, own = positions(TEACHER), positions(wide)
    sizes = [
        np.array([len(vocabulary[each[2]]) for each in rows]) for rows, vocabulary in ((theirs, TEACHER), (own, wide))
    ]
    source, offset, _ = holders(*sizes, np.ones(len(theirs), bool))
    energies = torch.stack([log_softmax_at(before, 6, 1) for _, before, _ in theirs])
    labels, tokens = (torch.tensor([token for *_, token in each]) for each in (theirs, own))
    targets = whole(energies, labels)
    vocabularies = token_bytes(TEACHER), token_bytes(wide)
    spelling = Spelling.of(*vocabularies, cut)
    cells = prefix_cells(*vocabularies, spelling.firsts(), np.full(6, -2))
    prefix = torch.from_numpy(spelling.read(tokens.numpy(), source, offset))
    source = torch.from_numpy(source)
    if inside:
        whole_targets = DenseTargets(energies, targets.label_logprob)
        near = condensed(whole_targets, TeacherCells.of(cells, spelling), source, prefix.clamp(min=0))
    else:
        prefix = torch.from_numpy(np.where(offset == 0, 0, -1))
        near = over(targets, torch.from_numpy(cells.of_teacher), torch.where(prefix == 0, source, -1))
    return aligned(near, prefix >= 0, CellIndex.of(torch.from_numpy(cells.of_student), cells.count)), tokens


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "at boundaries"])
@pytest.mark.parametrize("kind", ["first bytes", "a student of bytes", "prefixes"])
def test_the_term_equals_the_enumeration_of_all_texts_up_to_four_bytes(kind, inside, chunk):
    wide = BYTES if kind == "a student of bytes" else STUDENT

    def letters(texts):
        return [[wide.index(text[0])] for text in texts]

    cut = letters if kind == "first bytes" else lambda texts: [greedy(text, wide) for text in texts]
    targets, labels = aligned_of_texts(wide, cut, inside)
    student = torch.randn(len(labels), len(wide), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    student.requires_grad_()
    starts = sorted({wide[cut([each])[0][0]] for each in TEACHER} | {"a", "b"}, key=len, reverse=True)

    def cell_of(text):
        return next(each for each in starts if text.startswith(each))

    def teacher_cell_of(text):
        return wide[cut([text])[0][0]]

    assert all(cell_of(each) == teacher_cell_of(each) for each in TEACHER)
    cells, compared = brute_force(student, cell_of, wide, cut if inside else None)
    assert cells > 0.1 and torch.equal(targets.compared, compared)
    # where nothing of a token is known, or nothing that tells it from others of its cell, its text counts
    text = -torch.log_softmax(student, 1).gather(1, labels[:, None]).squeeze(1)[~targets.compared].sum()
    assert (text > 1) != (inside and kind == "a student of bytes")
    within = student.new_zeros(())
    for row in targets.compared.nonzero().flatten().tolist():
        own = next(each for each in starts if wide[labels[row]].startswith(each))
        members = [n for n, each in enumerate(wide) if cell_of(each) == own]
        within = within - torch.log_softmax(student[row, members], 0)[members.index(labels[row])]
    assert (within > 1) == (kind != "a student of bytes")
    expected = cells + text + within
    loss = loss_of(student, targets, labels, chunk)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    (got,), (want,) = (torch.autograd.grad(each, student) for each in (loss, expected))
    assert (got - want).norm() <= 1e-9 * want.norm()


def test_labels_shifted_by_one_make_the_cells_worse():
    own = torch.stack([log_softmax_at(before, 6, 1) for _, before, _ in positions(TEACHER)])
    source, labels = torch.arange(len(own)), torch.ones(len(own), dtype=torch.int64)
    near = over(whole(own, own.argmax(1)), torch.arange(6), source)
    right, shifted = (
        loss_of(own, aligned(each, source >= 0), labels).item() / len(own)
        for each in (near, near.map(lambda _, tensor: tensor.roll(1, 0)))
    )
    assert right < 1e-9 < 0.1 < shifted


def wrapped(p, near, cells=None):
    return aligned(near, torch.ones_like(p.mask), cells)


@pytest.mark.parametrize("rule", ["sampled-headless", "sampled", "ghost"])
@pytest.mark.parametrize("through", ["tokens", "cells of one token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_tokenizers_have_the_ordinary_objective_to_the_bit(rule, through, dtype):
    p = problem(n=40, padding=3, bias=dtype == torch.float64)
    near = targets_for(p, rule, torch.float32)
    cells = None if through == "tokens" else CellIndex.of(torch.arange(p.vocab_size), p.vocab_size)
    found = []
    for targets in (near, wrapped(p, near, cells)):
        ours = p.cast(dtype)
        out = run(ours, targets, 1.0, rule, chunk=16)
        found.append([out.loss, out.ce, out.kd, *torch.autograd.grad(out.loss, ours.leaves())])
        measured = measure(
            ours.hidden, ours.head, Supervision(ours.labels, ours.mask, targets), vocab_size=ours.vocab_size
        )
        found[-1] += [torch.tensor(measured.kl), torch.tensor(measured.cross_entropy)]
    for one, other in zip(*found, strict=True):
        if through == "tokens":
            assert torch.equal(one, other)
        else:  # sums over two columns more, which are 0
            bound = {torch.float32: 1e-5, torch.float64: 1e-9, torch.bfloat16: 1e-2}[dtype]
            assert (one - other).norm() <= bound * one.norm()


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("rule", ["sampled-headless", "sampled", "ghost"])
def test_cells_of_one_and_of_several_tokens_agree_with_autograd_over_all_logits(rule, softcap):
    p = problem(n=40, vocab=23, scale=0.8, softcap=softcap).cast(torch.float64)
    teacher = torch.cat([torch.arange(4), 4 + torch.arange(19) * 5 // 19])  # four cells of one token
    cells = teacher.clone()
    cells[[7, 20]] = 9  # no cell
    teacher[5] = -1
    targets = targets_for(p, rule)
    alone = p.mask.nonzero().squeeze(1)[[3, 5]]
    targets.ids[alone] = 5  # all that the teacher expects has no cell
    source = torch.arange(40)
    source[[2, 9, 30]] = -1
    near = over(targets, teacher, source)
    out = run(
        p, aligned(near, source >= 0, CellIndex.of(cells, 9)), 1.0, "sampled" if "sampled" in rule else rule, chunk=16
    )
    q = torch.log_softmax(p.logits(), 1)
    mass_q = torch.stack([q[:, cells == each].logsumexp(1) for each in range(9)], 1)
    one = torch.ones((), dtype=torch.float64)
    if rule == "ghost":
        weights = targets.top_logprobs(one).exp()
    else:
        weights = torch.cat([targets.top_logprobs(one).exp(), targets.drawn_weights(one)], 1)
    kd, named, unnamed = torch.zeros((), dtype=torch.float64), 0, 0
    for row in range(40):
        mass = torch.zeros(9, dtype=torch.float64)
        for token, weight in zip(targets.ids[row].tolist(), weights[row].tolist(), strict=True):
            if token < 23 and teacher[token] >= 0:
                mass[teacher[token]] += weight
        if p.mask[row] and (source[row] < 0 or not mass.any()):  # the text alone speaks
            kd = kd - q[row, p.labels[row]]
        if not p.mask[row] or source[row] < 0 or not mass.any():
            continue
        kept = mass > 0
        tail = targets.log_tail(1.0)[row].exp()
        if rule == "ghost":  # what has no cell is left out, and the rest is the whole
            mass, tail = mass / (mass.sum() + tail), tail / (mass.sum() + tail)
            listed = torch.bincount(teacher[targets.ids[row]].clamp(min=-1) + 1, minlength=10)[1:]
            more = (kept & (listed < torch.bincount(teacher + 1, minlength=10)[1:])).nonzero().flatten().tolist()
            likely, rest = mass_q[row].detach().exp(), 1 - mass_q[row, kept].detach().exp().sum()
            sets = [list(each) for size in range(len(more) + 1) for each in itertools.combinations(more, size)]
            level = min((tail + mass[each].sum()) / (rest + likely[each].sum()) for each in sets)
            mass[more], tail = torch.maximum(mass, level * likely)[more], level * rest
        kd = kd - (mass[kept] * mass_q[row, kept]).sum()
        if (own := cells[p.labels[row]]) < 9:  # the text tells the label from others of its cell
            named += int(kept[own])
            unnamed += int(not kept[own])
            kd = kd + mass_q[row, own] - q[row, p.labels[row]]
        if rule == "ghost":
            rest = 1 - mass_q[row, kept].exp().sum()
            kd = kd - tail * rest.log()
    assert named and unnamed
    ce = -(q.gather(1, p.labels[:, None]).squeeze(1) * p.mask).sum()
    expected = (0.3 * ce + 0.7 * kd) / 11.0
    got, want = (torch.autograd.grad(each, p.leaves()) for each in (out.loss, expected))
    assert out.ce.item() == pytest.approx(ce.item(), rel=1e-12)
    for one_grad, other in zip(got, want, strict=True):
        assert (one_grad - other).norm() <= 1e-6 * other.norm()  # the cells' masses are stored in fp32


def test_a_top_k_over_cells_is_least_at_the_teacher_and_asks_for_no_more_than_it_says():
    """Against all that the teacher may have prefix: the rest of its tokens has any masses, in any of their cells."""
    p = problem(n=30, vocab=23).cast(torch.float64)
    of_teacher = torch.cat([torch.arange(6), 6 + torch.arange(17) % 4])  # six cells of one token, four of several
    of_student = torch.cat([torch.arange(10), 1 + torch.arange(13) % 9])  # the label's cell is its own
    top_k = sparse(p.energies, p.labels, top_k=7, dtype=torch.float64)
    rows = torch.arange(30)
    near = over(top_k, of_teacher, rows)
    every = torch.ones(30, dtype=torch.bool)
    targets = aligned(near, every, CellIndex.of(of_student, 10))
    tell = torch.nn.functional.one_hot(of_student).double()
    mass_p = p.energies.exp() @ torch.nn.functional.one_hot(of_teacher).double()
    known = torch.zeros_like(p.energies).scatter(1, top_k.ids, 1.0)
    least = (p.energies.exp() * known) @ torch.nn.functional.one_hot(of_teacher).double()
    whole = torch.zeros_like(least).index_add_(1, of_teacher, 1 - known) == 0
    rest = 1 - least.sum(1)

    def divergence(logits):
        ready = logits.detach().requires_grad_()
        labels = torch.zeros(30, dtype=torch.int64)
        loss = loss_of(ready, targets, labels)
        comparison = targets.compare(ready.detach().clone(), labels, HeadPart()).divergence
        kl = (comparison.teacher.exp() * (comparison.teacher - comparison.student)).sum()
        return kl, torch.autograd.grad(loss, ready)[0]

    value, gradient = divergence((mass_p / tell.sum(0)).log()[:, of_student])
    assert value.abs() < 1e-5 and gradient.abs().max() < 1e-5  # the masses are stored in fp32

    logits = torch.randn(30, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    value, gradient = divergence(logits)
    mass_q = logits.softmax(1) @ tell
    # the nearest of these teachers to the student, by a descent in the rest's shares of the cells
    shares = (mass_q * ~whole).log().requires_grad_()
    options = {"tolerance_grad": 1e-9, "tolerance_change": 0, "line_search_fn": "strong_wolfe"}
    nearest = torch.optim.LBFGS([shares], 1, 2000, **options)

    def distance():
        nearest.zero_grad()
        found = least + rest[:, None] * shares.softmax(1)
        (total := torch.special.xlogy(found, found / mass_q).sum()).backward()
        return total

    nearest.step(distance)
    found = least + rest[:, None] * shares.detach().softmax(1)
    assert value.item() == pytest.approx(distance().item(), rel=1e-4)
    assert value < torch.special.xlogy(mass_p, mass_p / mass_q).sum()
    expected = logits.softmax(1) * (1 - (found / mass_q) @ tell.T)
    assert (gradient - expected).norm() < 1e-3 * expected.norm()


def test_samples_give_an_unbiased_gradient_as_the_loss_is_linear_in_their_counts():
    p = problem(n=6, vocab=9).cast(torch.float64)
    cells = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3])
    index, places = CellIndex.of(cells, 4), torch.arange(6)

    def gradient(counts):
        drawn = drawn_targets(torch.arange(9).expand(6, -1), (counts / 4).clamp(min=1e-9).log(), counts, 4)
        targets = aligned(over(drawn, cells, places), places >= 0, index)
        return torch.autograd.grad(run(p, targets, 1.0, "sampled", alpha=1.0).loss, p.leaves())[0]

    exact = gradient(4 * p.energies.exp())
    draws = 0
    for first in range(9):  # every outcome of four equal samples, with its probability
        counts = torch.zeros(6, 9, dtype=torch.float64)
        counts[:, first] = 4.0
        draws = draws + gradient(counts) * p.energies.exp()[:, first, None]
    assert (draws - exact).norm() <= 1e-6 * exact.norm()


def test_what_is_right_at_forward_kl_and_one_temperature_alone_is_refused_otherwise():
    p = problem()
    near = targets_for(p, "ghost")
    with pytest.raises(UsageError, match="cannot be computed across tokenizers"):
        run(p, wrapped(p, near), 1.0, "ghost", divergence="reverse-kl")
    for loss in (  # the function with a number, and the module with its own temperature
        lambda: run(p, wrapped(p, near), 2.0, "ghost"),
        lambda: DistillationLoss(temperature=2.0)(
            p.hidden, p.head, p.labels, p.mask, wrapped(p, near), vocab_size=p.vocab_size, normalizer=1.0
        ),
    ):
        with pytest.raises(UsageError, match="across tokenizers the targets are right at T = 1 only") as error:
            loss()
        assert "top-k" not in str(error.value)


def test_from_samples_the_divergence_over_cells_is_too_large_by_the_entropy_that_they_lack():
    size, count, draws = 60, 4000, 20
    energies = torch.log_softmax(-1.2 * torch.arange(1, size + 1).double().log(), 0).expand(count, -1)
    cells = torch.arange(size) // 3
    drawn = torch.multinomial(energies.exp(), draws, replacement=True, generator=torch.Generator().manual_seed(0))
    counts = torch.zeros(count, size).scatter_add_(1, drawn, torch.ones(drawn.shape))
    logprobs = (counts / draws).log().clamp_min(-1e4) - 0.3  # the tokens' own entropy, which says nothing of cells'
    targets = drawn_targets(torch.arange(size).expand(count, -1), logprobs, counts, draws)
    every = torch.arange(count)
    near, mask = over(targets, cells, every), torch.ones(count, dtype=torch.bool)
    ours = aligned(near, mask, CellIndex.of(cells, size // 3))
    found = measure(energies.float(), HeadPart(), Supervision(every % size, mask, ours), vocab_size=size).divergence()
    shares = torch.zeros(count, size // 3).index_add_(1, cells, counts / draws).double()
    lacking = (
        torch.special.entr(energies[:1].exp().view(20, 3).sum(1)).sum() - torch.special.entr(shares).sum(1)
    ).mean()
    assert found == pytest.approx(lacking.item(), abs=0.02) and found > 0.1


def test_of_whole_distributions_the_likeliest_cells_are_kept_and_the_rest_is_one_event(monkeypatch):
    p = problem(n=30).cast(torch.float32)
    of_teacher = torch.tensor([0, 1, 2, -1, 2, 3, 0, 4, 1] + [4] * (p.vocab_size - 9))
    mass = torch.zeros(30, 5, dtype=torch.float64)
    for token, cell in enumerate(of_teacher.tolist()):
        if cell >= 0:
            mass[:, cell] += p.energies[:, token].double().exp()
    mass /= mass.sum(1, keepdim=True)
    dense = DenseTargets(p.energies.half(), torch.zeros(30))
    found = condensed(dense, cells_of(of_teacher), torch.arange(30), torch.zeros(30, dtype=torch.int64))
    assert torch.allclose(found.logprobs.exp().double(), mass.gather(1, found.ids), atol=2e-3)
    assert found.top_k == 5 and (found.tail[:, 0] < -8).all()
    monkeypatch.setattr(teacher_cells, "MOST_CELLS", 2)
    found = condensed(dense, cells_of(of_teacher), torch.arange(30), torch.zeros(30, dtype=torch.int64))
    assert torch.equal(found.ids, mass.topk(2, dim=1).indices)
    assert torch.allclose(found.log_tail(1.0).exp().double(), 1 - mass.gather(1, found.ids).sum(1), atol=2e-3)


def test_a_teachers_bytes_are_those_of_its_own_labels():
    p = problem(n=4)
    near, at = targets_for(p, "ghost", torch.float32), torch.tensor([True, True, False, True])
    near = replace(near, label_logprob=torch.tensor([0.0, -3.0, 0.0, -1.0]))
    targets = AlignedTargets(near, at, torch.tensor([0.0, 3.0, 0.0, 5.0]), None)
    how = {"vocab_size": p.vocab_size, "chunk": 3, "bytes_N": torch.tensor([3, 1, 2, 4])}
    found = measure(p.hidden, p.head, Supervision(p.labels, torch.ones(4, dtype=torch.bool), targets), **how)
    assert (found.bytes, found.teacher_bytes, found.compared) == (10, 8, 3)
    assert found.teacher_bits_per_byte() == pytest.approx(4 / 8 / math.log(2))
    assert found.teacher_loss() == pytest.approx(4 / 8 * 10 / 4)
    assert found.bits_per_byte() == pytest.approx(found.cross_entropy / 10 / math.log(2))


@pytest.mark.parametrize("top_k", [0, 2])
def test_within_a_token_the_texts_own_is_one_more_sample_but_beside_a_top_k(top_k):
    """A teacher of `ab`, `ac` and `b`, and a student of a, b and c, which has read nothing or `a`."""
    spelling = Spelling(np.array([0, 2, 4, 5]), np.array([0, 1, 0, 2, 1]), 3)
    cells = TeacherCells.of(Cells(np.array([0, 0, 1]), np.array([0, 1, 2]), 3), spelling)
    mass = torch.tensor([[0.6, 0.2, 0.2], [0.0, 0.0, 1.0]])
    tail = mass * (torch.arange(3) >= top_k)
    log_tail = tail.sum(1).log()[:, None] * torch.tensor([1.0, 0.0])
    counts, logprobs = 10 * tail / tail.sum(1, keepdim=True), mass.log().clamp_min(FLOOR)
    targets = drawn_targets(torch.arange(3).expand(2, -1), logprobs, counts, 10, log_tail, top_k)
    source, prefix, own = torch.tensor([0, 0, 1, -1]), torch.tensor([0, 1, 1, 0]), torch.tensor([0, 2, 2, 2])
    found = coarsened(targets, cells, source, prefix, own)
    by_cell = torch.zeros(4, 4).scatter_add_(1, found.ids.clamp(max=3), found.counts / 10)
    # at the beginning cell a has 0.8 and cell b 0.2; behind a the cells b and c have 6 and 2 of 10, and c one more
    behind = [0.0, 0.75, 0.25] if top_k else [0.0, 6 / 9, 3 / 9]
    expected = torch.tensor([[0.8, 0.2, 0.0], behind, [0.0] * 3, [0.0] * 3])
    assert torch.allclose(by_cell[:, :3], expected, atol=1e-6)
    assert aligned(found, source >= 0).common().tolist() == [True, True, False, False]
