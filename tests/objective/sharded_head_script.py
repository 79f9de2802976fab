"""One rank of a group whose output head is sharded over rows of its weight, or of which each rank computes its rows'
logits alone; `test_sharded_head` starts it."""

from dataclasses import replace

import torch
import torch.distributed as dist
from objective_reference import HeadPart, problem, sparse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.metrics import chunks, losses, measure
from kdtrain.objective.targets import DenseTargets, OnlineTargets, Supervision

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
p = problem(n=24, bias=True).cast(torch.float64)
targets = sparse(p.energies, p.labels, top_k=5)
count = float(p.mask.sum())


def run(hidden, head, part):
    t = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    loss = distillation_loss(
        hidden, head, p.labels[part], p.mask[part], targets[part], temperature=t, alpha=0.7,
        vocab_size=p.vocab_size, normalizer=count,
    ).loss  # fmt: skip
    (1024.0 * loss).backward()  # as by a loss scale
    return loss.detach(), t.grad


# Each rank has its own tokens, unevenly: the sum of their losses is the loss of all.
cut = 7
mine = slice(0, cut) if rank == 0 else slice(cut, 24)
sharded = HeadPart(*(distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_() for x in p.leaves()[1:]))
hidden = p.hidden.detach()[mine].requires_grad_()
loss, slope = run(hidden, sharded, mine)
for x in (loss, slope):
    dist.all_reduce(x)
whole_loss, whole_slope = run(p.hidden, p.head, slice(0, 24))
torch.testing.assert_close(loss, whole_loss, rtol=1e-12, atol=0)
torch.testing.assert_close(slope, whole_slope, rtol=1e-10, atol=0)
torch.testing.assert_close(hidden.grad, p.hidden.grad[mine], rtol=1e-12, atol=1e-14)
for got, want in ((sharded.weight, p.head.weight), (sharded.bias, p.head.bias)):
    assert got.grad.placements == (Shard(0),), "each rank keeps its shard of the gradient"
    torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-12, atol=1e-14)
found, expected = (
    measure(p.hidden, head, Supervision(p.labels, p.mask, targets), vocab_size=23) for head in (sharded, p.head)
)
assert found == expected

# A head of which each rank computes its part of the logits, of the same tokens: every answer is that of the whole head.
kinds, reduce = set(), dist.all_reduce
dist.all_reduce = lambda tensor, *rest: kinds.add(tensor.dtype) or reduce(tensor, *rest)
rows = [slice(0, 9), slice(9, 26)][rank]  # three of padding
cases = {"cross-entropy": None, "top-k": (5, 0), "samples": (0, 12), "both": (4, 8), "all of a part": (12, 8)}
cases |= {"forward-kl": "dense", "jsd": "dense", "reverse-kl": "online"}
for name, kept in cases.items():
    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        p = problem(n=24, bias=True, padding=3, scale=1.3, softcap=5.0).cast(dtype)
        if name == "all of a part":  # the teacher's likely entries are all that rank 0 has
            p.energies = (p.energies + 10.0 * (torch.arange(23) < 9)).log_softmax(-1)
        targets = None
        if isinstance(kept, tuple):
            targets = sparse(p.energies, p.labels, *kept, dtype=torch.float64)
        elif kept == "dense":
            targets = DenseTargets(p.energies, p.energies.gather(1, p.labels.clamp(0, 22)[:, None]).squeeze(1))
        elif kept == "online":
            states, weight = torch.randn(24, 8, dtype=dtype), torch.randn(26, 8, dtype=dtype)
            dist.broadcast(states, 0)
            dist.broadcast(weight, 0)
            targets = OnlineTargets(states, p.labels, HeadPart(weight), 23)
        weight, bias = (x.detach()[rows].clone().requires_grad_() for x in p.leaves()[1:])
        part = replace(p.head, weight=weight, bias=bias, first=rows.start, size=26, group=dist.group.WORLD)
        hidden = p.hidden.detach().clone().requires_grad_()
        results = []
        for states, head in ((hidden, part), (p.hidden, p.head)):
            t = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
            output = distillation_loss(
                states, head, p.labels, p.mask, targets, temperature=t, alpha=0.7, vocab_size=23, normalizer=count,
                chunk=7, divergence=name if isinstance(kept, str) else "forward-kl",
            )  # fmt: skip
            output.loss.backward()
            results.append([output.loss.detach(), output.kd_at_one, states.grad, t.grad])
        results[0] += [weight.grad, bias.grad]
        results[1] += [x.grad[rows] for x in p.leaves()[1:]]
        for number, (got, want) in enumerate(zip(*results, strict=True)):
            if want is not None:
                error = (got - want).norm() / want.norm().clamp(min=1e-3)
                assert error <= near, (name, dtype, number, error)
        if dtype != torch.bfloat16:
            torch.testing.assert_close(part(p.hidden), p.head(p.hidden).detach(), rtol=near, atol=near)
        head = replace(part, size=23)
        found, expected = (
            measure(p.hidden, each, Supervision(p.labels, p.mask, targets), vocab_size=23) for each in (head, p.head)
        )
        assert torch.tensor(found.vector()).allclose(torch.tensor(expected.vector()), rtol=near, equal_nan=True), name
        if targets is not None:
            rows_of = Supervision(p.labels, p.mask, targets)
            of_part, of_whole = (
                torch.cat([losses(z_RV, own, each) for _, z_RV, own in chunks(p.hidden, each, rows_of, 23)])[p.mask]
                for each in (head, p.head)
            )
            torch.testing.assert_close(of_part, of_whole, rtol=near, atol=near)
assert kinds <= {torch.float32, torch.float64, torch.int64}, "what is summed is not rounded before"
tie = torch.tensor([[1.0, 3.0], [3.0, 3.0], [0.0, 2.0]]) if rank == 0 else torch.tensor([[3.0], [4.0], [1.0]])
top, ids = HeadPart(first=2 * rank, group=dist.group.WORLD).most_likely(tie)
assert top.tolist() == [3.0, 4.0, 2.0] and ids.tolist() == [1, 2, 1]
dist.destroy_process_group()
