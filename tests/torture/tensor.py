"""Do tensor ranks train what one process trains? Twenty steps of three micro-batches each, in every layout.

`make torture`, or `python -m tests.torture.tensor`. Each layout of CPU ranks over gloo trains a Llama and a Qwen3
shape, tied and untied, with SGD and with AdamW, from whole distributions at T = 2, beside the same in one process:
losses within 1e-5, weights within 1e-6 under SGD and 1e-4 of their norm under AdamW, and weights that each tensor rank
holds whole equal to the bit. Of four tensor ranks two share a head of keys and values; there the gradients of hidden
states, embedding, head, norms and T are those of one process within 1e-6 in fp64, from samples, a top-k with its tail,
whole distributions and JSD, with alpha 0, 0.5 and 1, and one and three micro-batches. The result is
benchmarks/results/torture-tensor.json.
"""

import functools
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist

from kdtrain.testing import run_ranks, tiny_model

STEPS, MICROS, VOCABULARY, CPU = 20, 3, 301, torch.device("cpu")
LAYOUTS = {"tp 2": (2, 2, "ddp"), "tp 4": (4, 4, "ddp"), "tp 2 x dp 2": (4, 2, "ddp"), "tp 2 x fsdp 2": (4, 2, "fsdp")}
"""Ranks, those of which compute a forward together, and how data ranks hold the parts."""
BITS = 1.2
"""How many times one process's error of bf16 four tensor ranks may have."""


def make(student, name: str):
    """Make an optimizer: the one of a run, or SGD, which keeps nothing."""
    from kdtrain.config.choices import OPTIMIZERS
    from kdtrain.config.sections import OptimizerConfig
    from kdtrain.training.optimizers import make_optimizer, register_optimizer

    class PlainSGD(torch.optim.SGD):
        state_bytes, scales = 0.0, False

        def __init__(self, groups, options) -> None:
            super().__init__(groups, lr=options.peak_lr)

        def guarded_step(self, found_inf, scale=None) -> None:
            self.step()

        def slots(self, parameter):
            return {}

    if name not in OPTIMIZERS.names():
        register_optimizer(name, help="SGD")(PlainSGD)
    return make_optimizer(student, OptimizerConfig(optimizer=name, lr={"sgd": 0.1, "adamw": 1e-3}[name]), 0.01)


def train(shape: str, tied: bool, optimizer: str, *stages) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train some steps in each layout of `stages`, from a file of the last one; return losses and final weights.

    Weights that each rank holds whole are equal to the bit after each stage.
    """
    from kdtrain.checkpoint import shards
    from kdtrain.models.head import split
    from kdtrain.objective.loss import DistillationLoss
    from kdtrain.parallel import parallelize, tensor
    from kdtrain.ranks import on_main
    from kdtrain.training.state import TrainState
    from kdtrain.training.student import Student
    from tests.parallel.wrap_script import batch, whole

    losses, folder, done, state = list[float](), Path(on_main(tempfile.mkdtemp)), 0, None
    for steps, layout, kind in stages:
        model = split(tiny_model(shape, VOCABULARY, seed=3, tie_word_embeddings=tied))
        if layout.tensor_size > 1:
            tensor.apply(model, layout, CPU, vocab_size=VOCABULARY, sequence=True)
            if kind == "fsdp":
                parallelize.shard(model, layout.mesh)
        student = Student(model, DistillationLoss(alpha=0.9, temperature=2.0), vocab_size=300)
        wrapped = parallelize.parallelize(student, kind if layout.data_size > 1 else "single", layout)
        before, state = state, TrainState(student, make(student, optimizer))
        if before is not None:
            state.load(shards.read(folder, state.like), {**before.numbers(), "watchers": {}})
        mine = MICROS * 2 // layout.data_size
        for step in range(done, done + steps):
            total = torch.zeros((), dtype=torch.float64)
            for number in range(mine):
                with wrapped.micro_batch(last=number == mine - 1):
                    place = 6 * step + layout.data_rank * mine + number
                    output = wrapped(batch(place % 8), 100.0)  # from whose number its mask follows
                    output.loss.backward()
                total += output.loss.detach()
            parallelize.sum_over_tensor_ranks(model, layout)
            losses.append(float(layout.sum(total)))
            state.optimizer.guarded_step(torch.tensor(0.0))
            state.optimizer.zero_grad()
        done += steps
        for name in model.once if layout.tensor_size > 1 else ():
            own = whole(model.get_parameter(name).detach())
            bits = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(bits, own.contiguous())
            assert all(torch.equal(each, own) for each in bits), name
        shards.write(folder, state.tensors())
    on_main(lambda: shutil.rmtree(folder))
    return losses, {name: whole(each.detach()) for name, each in model.named_parameters()}


TARGETS = {
    "samples": ((0, 12), 1.0, "forward-kl"),
    "top-k with its tail": ((6, 0), 2.0, "forward-kl"),
    "dense": (None, 2.0, "forward-kl"),
    "jsd": (None, 2.0, "jsd"),
}
"""Kept entries and samples, or none of whole distributions; T, and the divergence."""
MODELS = {"llama": True, "qwen3": False, "gemma2": True}
"""Shapes, the last with a soft cap, and whether their head is tied."""


def batch_of(kept: tuple[int, int] | None, number: int, dtype: torch.dtype):
    """Make a micro-batch with a mask of its own, whose teacher is sure of the first rank's tokens."""
    from kdtrain.objective.batch import Batch
    from tests.objective.objective_reference import dense, sparse

    g = torch.Generator().manual_seed(number)
    tokens = torch.randint(300, (2, 9), generator=g)
    mask = torch.rand(2, 8, generator=g) < 0.3 + 0.2 * number
    likely = 8.0 * (torch.arange(300) < 70)
    energies = (torch.randn(16, 300, generator=g, dtype=torch.float64) + likely).log_softmax(-1)
    labels = tokens[:, 1:].flatten()
    targets = dense(energies, labels, dtype) if kept is None else sparse(energies, labels, *kept, dtype=dtype)
    return Batch(tokens, mask, torch.zeros(2, 8, dtype=torch.int64), targets)


def gradients(shape: str, name: str, alpha: float, micros: int, layout, mode: str = "fp64") -> dict[str, torch.Tensor]:
    """Return the gradients of a step of some micro-batches, in fp64 or, as a run has them, in bf16."""
    from kdtrain.models.head import split
    from kdtrain.objective.loss import DistillationLoss
    from kdtrain.objective.temperature import build_temperature
    from kdtrain.parallel import parallelize, tensor
    from kdtrain.training.student import Student
    from tests.parallel.wrap_script import whole

    kept, start, divergence = TARGETS[name]
    model = split(tiny_model(shape, VOCABULARY, seed=3, tie_word_embeddings=MODELS[shape]))
    if mode == "fp64":
        model.double()
    if layout.tensor_size > 1:
        tensor.apply(model, layout, CPU, vocab_size=VOCABULARY, sequence=True)
    states = list[torch.Tensor]()
    model.register_forward_hook(lambda *of: states.append(of[2]) or of[2].retain_grad())
    temperature = build_temperature("minimize", start=start, minimum=0.5, maximum=4.0)
    loss = DistillationLoss(divergence=divergence, alpha=alpha, temperature=temperature)
    student, dtype = Student(model, loss, vocab_size=300), torch.float32
    if mode == "fp64":
        loss, dtype = loss.double(), torch.float64
    else:
        student.mode = mode
    for number in range(micros):
        student(batch_of(kept, number, dtype), 20.0).loss.backward()
    parallelize.sum_over_tensor_ranks(model, layout)
    found = {name: whole(each.grad) for name, each in student.named_parameters() if each.grad is not None}
    return found | {f"hidden states {number}": each.grad for number, each in enumerate(states)}


def compare_gradients() -> None:
    """Compare the gradients of four tensor ranks with those of one process, on each rank; rank 0 prints the largest."""
    from kdtrain.parallel.layout import RankLayout
    from kdtrain.ranks import process_group

    torch.set_num_threads(1)
    with process_group(CPU, 600):
        layout = RankLayout.of_ranks(CPU, 4)
        for case in itertools.product(MODELS, TARGETS, (0.0, 0.5, 1.0), (1, 3)):
            one, many = (gradients(*case, each) for each in (RankLayout(), layout))
            assert one.keys() == many.keys(), case
            apart = {name: float((many[name] - each).norm() / (each.norm() + 1e-9)) for name, each in one.items()}
            worst = max(apart, key=lambda name: apart[name])
            if dist.get_rank() == 0:
                print(json.dumps({"case": case, "of": worst, "relative": apart[worst]}), flush=True)
            assert apart[worst] <= 1e-6, (case, worst, apart[worst])


def compare_in_bf16() -> None:
    """Compare the errors of four tensor ranks in bf16 with those of one process, both against fp64, by parts.

    A part's error is the root of the mean square, over all cases, of a gradient's distance relative to its norm.
    """
    from kdtrain.parallel.layout import RankLayout
    from kdtrain.ranks import process_group

    parts = ("hidden states", "embed_tokens", "lm_head", "norm", "proj", "temperature")
    torch.set_num_threads(1)
    with process_group(CPU, 600):
        layout, squares = RankLayout.of_ranks(CPU, 4), defaultdict(lambda: [0.0, 0.0])
        for case in itertools.product(MODELS, TARGETS, (0.0, 0.5, 1.0), (1, 3)):
            ways = (RankLayout(),), (RankLayout(), "bf16"), (layout, "bf16")
            exact, *both = (gradients(*case, *how) for how in ways)
            for name, each in exact.items():
                part = next(part for part in parts if part in name)
                for number, found in enumerate(both):
                    squares[part][number] += float((found[name] - each).norm() / (each.norm() + 1e-9)) ** 2
        for part, (one, many) in squares.items():
            times = (many / one) ** 0.5
            if dist.get_rank() == 0:
                print(json.dumps({"bf16": part, "of one process": one**0.5, "times": times}), flush=True)
            # T has one number a case, whose error is chance: it must only be below what bf16 rounds
            assert times <= BITS or (part == "temperature" and many**0.5 < 2**-9), (part, times)


def compare(name: str) -> None:
    """Train in a layout and in one process, on each rank; rank 0 prints the distances."""
    from kdtrain.parallel.layout import RankLayout
    from kdtrain.ranks import process_group

    torch.set_num_threads(1)
    _, size, kind = LAYOUTS[name]
    with process_group(CPU, 600):
        stage = STEPS, RankLayout.of_ranks(CPU, size), kind
        for case in itertools.product(("llama", "qwen3"), (True, False), ("sgd", "adamw")):
            near(name, case, train(*case, (STEPS, RankLayout(), kind)), train(*case, stage))


def near(name: str, case: tuple[str, bool, str], one, many) -> None:
    """Print on rank 0 how far losses and weights are apart, and assert that it is as near as promised."""
    loss = max(abs(a - b) for a, b in zip(one[0], many[0], strict=True))
    apart = max(float((many[1][each] - weight).norm() / weight.norm()) for each, weight in one[1].items())
    largest = max(float((many[1][each] - weight).abs().max()) for each, weight in one[1].items())
    if dist.get_rank() == 0:
        found = {"loss": loss, "relative": apart, "largest": largest}
        print(json.dumps({"layout": name, "case": "{} {} {}".format(*case), **found}), flush=True)
    assert loss <= 1e-5, (name, case)
    assert largest <= 1e-6 if case[-1] == "sgd" else apart <= 1e-4, (name, case)


def resume() -> None:
    """Resume in other layouts twice, near one process, and in the same layout twice, with the same bits."""
    from kdtrain.parallel.layout import RankLayout
    from kdtrain.ranks import process_group

    torch.set_num_threads(1)
    with process_group(CPU, 600):
        pairs, four = RankLayout.of_ranks(CPU, 2), RankLayout.of_ranks(CPU, 4)
        first, second = STEPS // 3, 2 * STEPS // 3
        steps = first, second - first, STEPS - second
        for case in itertools.product(("llama", "qwen3"), (True, False), ("sgd", "adamw")):
            layouts = (RankLayout(), "ddp"), (pairs, "fsdp"), (four, "ddp")
            for order in (layouts, layouts[::-1]):
                stages = [(many, *how) for many, how in zip(steps, order, strict=True)]
                near("resumed", case, train(*case, (STEPS, RankLayout(), "ddp")), train(*case, *stages))
            for layout in layouts[1:]:
                once, twice = train(*case, (STEPS, *layout)), train(*case, *((many, *layout) for many in steps))
                assert once[0] == twice[0] and all(torch.equal(twice[1][name], each) for name, each in once[1].items())


def main() -> None:
    """Start the ranks of each layout, and keep what they print."""
    if len(sys.argv) > 1:
        named = {"gradients": compare_gradients, "bf16": compare_in_bf16, "resumed": resume}
        named.get(sys.argv[1], functools.partial(compare, sys.argv[1]))()
        return
    from benchmarks.harness import RESULTS

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    for name, (world, *_) in {**LAYOUTS, "gradients": (4,), "bf16": (4,), "resumed": (4,)}.items():
        run_ranks(Path(__file__), world, name, seconds=3600)
        print(f"{name}: equal")
    (RESULTS / "torture-tensor.json").write_text(json.dumps({"layouts": [*LAYOUTS], "steps": STEPS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
