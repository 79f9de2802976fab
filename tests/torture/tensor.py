"""Do tensor ranks train what one process trains? Twenty steps of three micro-batches and more, in every layout.

`make torture`, or `python -m tests.torture.tensor`. Each layout of CPU ranks over gloo trains a Llama and a Qwen3
shape, tied and untied, with SGD and with AdamW, from whole distributions at T = 2, beside the same in one process:
losses within 1e-5, weights within 1e-6 under SGD and 1e-4 of their norm under AdamW, and weights that each tensor rank
holds whole equal to the bit; also where the layout changes twice, and to the bit where it stays. On two and four tensor
ranks, of which then two share a head of keys and values, the gradients of hidden states, embedding, head, norms and T
are those of one process within 1e-6 in fp64, from samples, a top-k with its tail, whole distributions and JSD, with
alpha 0, 0.5 and 1, and one and three micro-batches; in bf16 on four their errors are at most 1.2 times those of one
process. The largest distances are written to benchmarks/results/torture-tensor.json.
"""

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

from kdtrain.parallel.layout import RankLayout
from kdtrain.testing import run_ranks, tiny_model

STEPS, MICROS, VOCABULARY, CPU = 20, 3, 301, torch.device("cpu")
LAYOUTS = {"tp 2": (2, 2, "ddp"), "tp 4": (4, 4, "ddp"), "tp 2 x dp 2": (4, 2, "ddp"), "tp 2 x fsdp 2": (4, 2, "fsdp")}
"""Ranks, those of which compute a forward together, and how data ranks hold the parts."""
CASES = [*itertools.product(("llama", "qwen3"), (True, False), ("sgd", "adamw"))]
"""Shape, whether its head is tied, and the optimizer."""
BITS, SEEDS = 1.2, range(8)
"""How many times one process's error of bf16 four tensor ranks may have, over how many models and batches."""
FOUND: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
"""The largest distances by comparison."""


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


def near(name: str, case: tuple[str, bool, str], one, many) -> None:
    """Assert that losses and weights are as near as promised."""
    loss = max(abs(a - b) for a, b in zip(one[0], many[0], strict=True))
    apart = max(float((many[1][each] - weight).norm() / weight.norm()) for each, weight in one[1].items())
    largest = max(float((many[1][each] - weight).abs().max()) for each, weight in one[1].items())
    weights = {"sgd, largest": largest} if case[-1] == "sgd" else {"adamw, relative": apart}
    note(name, case, loss=loss, **weights)
    assert loss <= 1e-5, (name, case)
    assert largest <= 1e-6 if case[-1] == "sgd" else apart <= 1e-4, (name, case)


def note(name: str, case: object, **found: float) -> None:
    """Keep the largest numbers of a comparison, and print them on rank 0."""
    for key, each in found.items():
        FOUND[name][key] = max(FOUND[name][key], each)
    if dist.get_rank() == 0:
        print(name, case, json.dumps(found), flush=True)


def compare_layouts() -> None:
    """Train in each layout of as many ranks and in one process; resume in other layouts twice, and in the same."""
    layouts = {
        name: (RankLayout.of_ranks(CPU, size), kind)
        for name, (world, size, kind) in LAYOUTS.items()
        if world == dist.get_world_size()
    }

    def stages(*each: tuple[RankLayout, str]) -> list[tuple[int, RankLayout, str]]:
        third = STEPS // 3
        return [(many, *how) for many, how in zip((third, third, STEPS - 2 * third), each, strict=True)]

    for case in CASES:
        alone = train(*case, (STEPS, RankLayout(), "ddp"))
        whole = {name: train(*case, (STEPS, *layout)) for name, layout in layouts.items()}
        for name, each in whole.items():
            near(name, case, alone, each)
        if len(layouts) == 1:
            continue
        order = (RankLayout(), "ddp"), layouts["tp 2 x fsdp 2"], layouts["tp 4"]
        for each in (order, order[::-1]):
            near("resumed in other layouts", case, alone, train(*case, *stages(*each)))
        for name in ("tp 2 x fsdp 2", "tp 4"):
            once, twice = whole[name], train(*case, *stages(*[layouts[name]] * 3))
            assert once[0] == twice[0] and all(torch.equal(twice[1][each], own) for each, own in once[1].items()), name


TARGETS = {
    "samples": ((0, 12), 1.0, "forward-kl"),
    "top-k with its tail": ((6, 0), 2.0, "forward-kl"),
    "dense": (None, 2.0, "forward-kl"),
    "jsd": (None, 2.0, "jsd"),
}
"""Kept entries and samples, or none of whole distributions; T, and the divergence."""
MODELS = {"llama": True, "qwen3": False, "gemma2": True}
"""Shapes, the last with a soft cap, and whether their head is tied."""


def batch_of(kept: tuple[int, int] | None, number: int, seed: int, dtype: torch.dtype):
    """Make a micro-batch with a mask of its own, whose teacher is sure of the first rank's tokens."""
    from kdtrain.objective.batch import Batch
    from tests.objective.objective_reference import dense, sparse

    g = torch.Generator().manual_seed(100 * seed + number)
    tokens = torch.randint(300, (2, 9), generator=g)
    mask = torch.rand(2, 8, generator=g) < 0.3 + 0.2 * number
    likely = 8.0 * (torch.arange(300) < 70)
    energies = (torch.randn(16, 300, generator=g, dtype=torch.float64) + likely).log_softmax(-1)
    labels = tokens[:, 1:].flatten()
    targets = dense(energies, labels, dtype) if kept is None else sparse(energies, labels, *kept, dtype=dtype)
    return Batch(tokens, mask, torch.zeros(2, 8, dtype=torch.int64), targets)


class Gradients:
    """A model in a layout, and the gradients of its steps, in fp64 or, as a run has them, in bf16."""

    def __init__(self, shape: str, layout: RankLayout, mode: str = "fp64", seed: int = 3) -> None:
        from kdtrain.models.head import split
        from kdtrain.parallel import tensor

        self.layout, self.mode, self.seed = layout, mode, seed
        self.model = split(tiny_model(shape, VOCABULARY, seed=seed, tie_word_embeddings=MODELS[shape]))
        if mode == "fp64":
            self.model.double()
        if layout.tensor_size > 1:
            tensor.apply(self.model, layout, CPU, vocab_size=VOCABULARY, sequence=True)
        self.states = list[torch.Tensor]()
        self.model.register_forward_hook(lambda *of: self.states.append(of[2]) or of[2].retain_grad())

    def of(self, name: str, alpha: float, micros: int) -> dict[str, torch.Tensor]:
        """Return those of a step of some micro-batches, and of its hidden states."""
        from kdtrain.objective.loss import DistillationLoss
        from kdtrain.objective.temperature import build_temperature
        from kdtrain.parallel import parallelize
        from kdtrain.training.student import Student
        from tests.parallel.wrap_script import whole

        self.model.zero_grad()
        self.states.clear()
        kept, start, divergence = TARGETS[name]
        temperature = build_temperature("minimize", start=start, minimum=0.5, maximum=4.0)
        loss = DistillationLoss(divergence=divergence, alpha=alpha, temperature=temperature)
        student, dtype = Student(self.model, loss, vocab_size=300), torch.float32
        if self.mode == "fp64":
            loss, dtype = loss.double(), torch.float64
        else:
            student.mode = self.mode
        for number in range(micros):
            student(batch_of(kept, number, self.seed, dtype), 20.0).loss.backward()
        parallelize.sum_over_tensor_ranks(self.model, self.layout)
        found = {name: whole(each.grad) for name, each in student.named_parameters() if each.grad is not None}
        return found | {f"hidden states {number}": each.grad for number, each in enumerate(self.states)}


def compare_gradients() -> None:
    """Compare the gradients of all ranks as tensor ranks with those of one process, on each rank."""
    size = dist.get_world_size()
    layout = RankLayout.of_ranks(CPU, size)
    for shape in MODELS:
        both = Gradients(shape, RankLayout()), Gradients(shape, layout)
        for case in itertools.product(TARGETS, (0.0, 0.5, 1.0), (1, 3)):
            one, many = (each.of(*case) for each in both)
            assert one.keys() == many.keys(), case
            apart = {name: float((many[name] - each).norm() / (each.norm() + 1e-9)) for name, each in one.items()}
            worst = max(apart, key=lambda name: apart[name])
            note(f"gradients in fp64, tp {size}", (shape, *case, worst), relative=apart[worst])
            assert apart[worst] <= 1e-6, (shape, case, worst, apart[worst])


def compare_in_bf16() -> None:
    """Compare the errors of four tensor ranks in bf16 with those of one process, both against fp64, by parts.

    The error of a gradient is the root of its mean square over the seeds, relative to that of the gradient: a single
    error, of T above all, which is one number, is chance. A part's is the root of the mean square over its gradients.
    """
    parts = ("hidden states", "embed_tokens", "lm_head", "norm", "proj", "temperature")
    layout, squares = RankLayout.of_ranks(CPU, 4), defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
    for shape, seed in itertools.product(MODELS, SEEDS):
        ways = (RankLayout(),), (RankLayout(), "bf16"), (layout, "bf16")
        models = [Gradients(shape, *how, seed=seed) for how in ways]
        for target in TARGETS:
            exact, *both = (each.of(target, 0.5, 1) for each in models)
            for name, each in exact.items():
                three = each, *(found[name] - each for found in both)
                squares[shape, target, name] += torch.stack([of.double().square().sum() for of in three])
    for part in parts:
        exact, one, many = torch.stack([each for (*_, name), each in squares.items() if part in name]).T
        errors = [float((each / exact).mean().sqrt()) for each in (one, many)]
        note("bf16", part, **{f"{part}, of one process": errors[0], f"{part}, times": errors[1] / errors[0]})
        assert errors[1] <= BITS * errors[0], (part, errors)


COMPARISONS = {
    "layouts": (compare_layouts, (2, 4)),
    "gradients": (compare_gradients, (2, 4)),
    "bf16": (compare_in_bf16, (4,)),
}
"""Each, and in how many ranks."""


def compare(name: str, path: Path) -> None:
    """Make a comparison on this rank; the first writes the largest distances."""
    from kdtrain.ranks import process_group

    torch.set_num_threads(1)
    with process_group(CPU, 600):
        COMPARISONS[name][0]()
        if dist.get_rank() == 0:
            path.write_text(json.dumps(FOUND))


def main() -> None:
    """Start the ranks of each comparison, and write what they find."""
    from benchmarks.harness import RESULTS, write

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    record = {"torch": torch.__version__, "steps": STEPS, "cases": len(CASES), "seeds of bf16": len(SEEDS)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found")
        for name, (_, worlds) in COMPARISONS.items():
            for world in worlds:
                run_ranks(Path(__file__), world, name, path, seconds=7200)
                record |= json.loads(path.read_text())
    write(RESULTS / "torture-tensor.json", record)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compare(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
