"""One rank of a group whose output head is sharded over rows of its weight; `test_sharded_head` starts it."""

import torch
import torch.distributed as dist
from objective_reference import HeadPart, problem, sparse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.metrics import measure

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
found, expected = (measure(p.hidden, head, p.labels, p.mask, targets, vocab_size=23) for head in (sharded, p.head))
assert found == expected
dist.destroy_process_group()
