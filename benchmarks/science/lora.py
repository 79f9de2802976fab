"""Adapters against all weights for distillation from a cache: ranks, a frozen head, rates, seeds.

    python -m benchmarks.science.lora                 two hours on one core; the same command resumes it
    python -m benchmarks.science.lora --quick --out runs/lora-quick     a few minutes, to see that it works

The base is a student of the shipped teacher's family, trained by cross-entropy on the teacher's text. Each kind then
distils the teacher from a cache of another text (the docstrings of installed libraries), by the real command, from the
same base, in as many steps and over the same batches. Each kind has rates of its own: all are tried with the first
seed, more where the best is at the edge, and the best, by validation loss, with the other seeds. Validation loss,
trained parameters, bytes of a checkpoint and peak memory are those of the runs; tokens a second are the median of five
short runs, the kinds in turn, and mean something on a quiet machine. "int8 base" is rank 16 beside frozen weights in
int8; its loss merged into the whole ones is another number.

Rank 16 runs once more for as many steps as fit into the time of all weights, by those tokens a second, and all weights
with other warm-ups and other alphas.

`head` is the objective alone, with a trained and with a frozen head, each in a process of its own.

What it gives up: one base of one size; the rates are a factor of two apart, and those of other seeds are not searched.
"""

import itertools
import json
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from benchmarks.harness import RESULTS, ROOT, STUDENT, TEACHER, write
from benchmarks.harness.command import Kdtrain, claim, environment, options
from benchmarks.harness.study import Study
from benchmarks.harness.timing import turns
from benchmarks.science import docstrings
from kdtrain.config.values import Options, option

KINDS: dict[str, tuple[str, ...]] = {
    "all weights": (),
    "frozen head": ("--freeze-head",),
    **{f"rank {rank}": ("--lora-rank", f"{rank}") for rank in (4, 16, 64)},
    "int8 base": ("--lora-rank", "16", "--base-weights", "int8"),
}
RATES = {"all weights": (2.5e-4, 5e-4, 1e-3, 2e-3), "frozen head": (2.5e-4, 5e-4, 1e-3, 2e-3)}
OF_ADAPTERS = (1e-3, 2e-3, 4e-3, 8e-3)
ROUNDS, TURN = 5, 15
"""Runs of each kind for its speed, and their steps."""
VARIED, EQUAL = ("all weights",), ("rank 16",)
VARIANTS: dict[str, tuple[str, ...]] = {
    "no warm-up": ("--warmup-steps", "0"),
    "warm-up of half the run": ("--warmup-steps", "HALF"),
    "alpha 0.5": ("--alpha", "0.5"),
    "alpha 1": ("--alpha", "1"),
}
"""Against the usual: a warm-up of 20 steps, alpha 0.9. HALF stands for half of the steps."""


@dataclass(frozen=True, kw_only=True)
class LoraStudy(Options):
    """Compare adapters with all weights."""

    out: Path = Path("runs/lora")
    """The folder of caches and runs."""
    result: Path = RESULTS / "lora.json"
    """The record to write."""
    seeds: int = option(3, least=1)
    """Runs of each kind at its best rate."""
    base_steps: int = option(800, least=1)
    """Steps of the base, by cross-entropy."""
    steps: int = option(100, least=1)
    """Steps of each run."""
    sequences: int = option(500, least=1)
    """Sequences of the cache."""
    quick: bool = False
    """Little text, few steps, one rate, one seed, small shapes: to see that it works."""
    minutes: float = option(1e9, above=0)
    """After this time no further run begins; the same command goes on."""


def main(given: LoraStudy) -> None:
    """Run the study, and write its record."""
    base_steps, steps = (40, 12) if given.quick else (given.base_steps, given.steps)
    sequences, seeds = (100, 1) if given.quick else (given.sequences, given.seeds)
    claim(given.out, {"base_steps": base_steps, "steps": steps, "sequences": sequences, "seeds": seeds})
    text = ROOT / "docs" if given.quick else docstrings.write(given.out / "docstrings.jsonl")
    length = ("--seq-len", "256", "--validation-sequences", "64")
    caches = {"cache": ("--teacher", TEACHER, "--data", f"{text}", "--num-sequences", f"{sequences}", *length)}
    common = ("--batch-size", "16", "--warmup-steps", "20", "--precision", "fp32", "--no-compile", "--log-to", "none")
    with Kdtrain() as kdtrain:
        study = Study(given.out, kdtrain, caches, common)
        first = ("--data", "stdlib", *length, "--student", STUDENT, "--lr", "2e-3", "--steps", f"{base_steps}")
        first += ("--num-sequences", "200") if given.quick else ()
        base, _ = study.train("base", *first, cache=None)

        def run(name: str, entry: Entry) -> dict[str, Any]:
            words = ("--student", f"{given.out / 'base'}", "--lr", f"{entry.rate}", "--seed", f"{entry.seed}")
            more = (word.replace("HALF", f"{steps // 2}") for word in VARIANTS.get(entry.variant, ()))
            every = ("--eval-freq", f"{TURN}") if entry.variant == "speed" else ()
            last = ("--steps", f"{entry.steps}", *every, *more)
            answer, _ = study.train(name, *words, *KINDS[entry.kind], *last, may_fail=True)
            of = {"kind": entry.kind, "lr": entry.rate, "seed": entry.seed, "variant": entry.variant}
            return {**of, "steps": entry.steps, **_measured(given.out / name, answer)}

        tried = {kind: [*RATES.get(kind, OF_ADAPTERS)][: 1 if given.quick else None] for kind in KINDS}

        def made(entries: list[Entry]) -> list[dict[str, Any]]:
            return study.records({each.name: each for each in entries}, run, minutes=given.minutes)

        def entry_of(kind: str, rate: float) -> tuple[str, Entry]:
            entry = Entry(kind, rate, 0, steps)
            return entry.name, entry

        records, found = study.tuned(tried, entry_of, run, "validation_loss", given.minutes, not given.quick)
        best = {kind: tried[kind][0] if rate is None else rate for kind, rate in found.items()}
        again = [Entry(kind, rate, seed, steps) for kind, rate in best.items() for seed in range(1, seeds)]
        records += made(again)
        rounds = turns([*KINDS], 1 if given.quick else ROUNDS)
        short = [Entry(kind, 1e-3, number, min(steps, TURN), "speed") for number, kind in rounds]
        timed = made(short)
        speed = {kind: _speed([each for each in timed if each["kind"] == kind]) for kind in KINDS}
        equal = {kind: round(steps * speed[kind] / speed["all weights"]) for kind in EQUAL}
        others = [Entry(kind, best[kind], seed, equal[kind], "equal time") for kind in EQUAL for seed in range(seeds)]
        each_variant = itertools.product(range(seeds), VARIED, VARIANTS)
        others += [Entry(kind, best[kind], seed, steps, variant) for seed, kind, variant in each_variant]
        varied = made(others)
    head = [_head(rows, 64 if given.quick else 896, 64 if given.quick else 256) for rows in (2048, 151_936)]
    wanted = sum(map(len, tried.values())) + len(again) + len(short) + len(others)
    record = {
        "environment": environment(given.out / "base"),
        "settings": {"base_steps": base_steps, "steps": steps, "sequences": sequences, "quick": given.quick},
        "base": {"validation_loss_on_its_text": base["best_validation_loss"]},
        "left": wanted - len(records) - len(timed) - len(varied),
        "kinds": {kind: _row(kind, best[kind], records) | {"tokens_per_second": speed[kind]} for kind in KINDS},
        "variants": _variants(varied),
        "runs": records + timed + varied,
        "head": head,
    }
    write(given.result, record)
    for kind, row in record["kinds"].items():
        print(kind, row)
    for each in head:
        print(each)


class Entry(NamedTuple):
    """A run of the grid."""

    kind: str
    rate: float
    seed: int
    steps: int
    variant: str = ""

    @property
    def name(self) -> str:
        """Its folder."""
        return "-".join(
            [self.kind, f"lr{self.rate:g}", *([self.variant] if self.variant else []), f"{self.seed}"]
        ).replace(" ", "-")


def _measured(folder: Path, answer: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one run; losses are None where it failed."""
    student = json.loads((folder / "environment.json").read_text())["student"]
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda path: path.name)
    return {
        "begins_at": answer.get("first_validation_loss"),
        "validation_loss": answer.get("best_validation_loss"),
        "merged_validation_loss": answer.get("merged_validation_loss"),
        "teacher": answer.get("teacher_validation_loss"),
        "trained_parameters": student.get("trained_parameters", student["parameters"]),
        "checkpoint_bytes": sum(file.stat().st_size for file in newest.iterdir()),
        "peak_memory_mb": answer.get("peak_memory_mb"),
        "tokens_per_second": answer.get("tokens_per_second"),
    }


def _speed(records: list[dict[str, Any]]) -> float:
    """Tokens a second, the median over runs; 1 where none ended."""
    return median([each["tokens_per_second"] for each in records if each["tokens_per_second"]] or [1.0])


def _variants(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The losses of a kind's variant over the seeds."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for each in records:
        of = {"kind": each["kind"], "variant": each["variant"], "lr": each["lr"], "steps": each["steps"], "losses": []}
        rows.setdefault((each["kind"], each["variant"]), of)["losses"].append(each["validation_loss"])
    return list(rows.values())


def _row(kind: str, rate: float, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The table's row of a kind: means over the seeds at its best rate, and the losses themselves."""
    own = [each for each in records if (each["kind"], each["lr"]) == (kind, rate) and each["validation_loss"]]
    losses = [each["validation_loss"] for each in own]
    names = ("trained_parameters", "checkpoint_bytes", "peak_memory_mb")
    numbers = {name: mean(each[name] for each in own) if own and own[0][name] else None for name in names}
    merged = [each["merged_validation_loss"] for each in own if each.get("merged_validation_loss")]
    numbers |= {"merged_validation_loss": mean(merged)} if merged else {}
    return {"lr": rate, "validation_loss": mean(losses) if losses else None, "losses": losses, **numbers}


def _head(vocabulary: int, width: int, tokens: int) -> dict[str, Any]:
    """Seconds and peak memory of loss and gradients with a trained and with a frozen output head."""
    sides = {}
    for name, trained in (("trained", True), ("frozen", False)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # a peak is that of a process
            sides[name] = pool.apply(_side, (vocabulary, width, tokens, trained))
    return {"vocabulary": vocabulary, "width": width, "tokens": tokens, **sides}


def _side(vocabulary: int, width: int, tokens: int, trained: bool) -> dict[str, float]:
    import torch

    from kdtrain.models.output_head import OutputHead
    from kdtrain.objective.loss import DistillationLoss
    from kdtrain.ranks import peak_memory_mb

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, width, device=device).mul_(width**-0.5).requires_grad_(trained)
    hidden = torch.randn(tokens, width, device=device, dtype=kind, requires_grad=True)
    labels, mask = (
        torch.randint(vocabulary, (tokens,), device=device),
        torch.ones(tokens, dtype=torch.bool, device=device),
    )
    loss, before, seconds = DistillationLoss(alpha=0.0), peak_memory_mb(device), []
    for _ in range(6):
        begun = time.perf_counter()
        output = loss(hidden, OutputHead(weight), labels, mask, None, vocab_size=vocabulary, normalizer=float(tokens))
        output.loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        weight.grad = hidden.grad = None
    return {"seconds": min(seconds[1:]), "peak_mb_above_its_inputs": peak_memory_mb(device) - before}


if __name__ == "__main__":
    main(options(LoraStudy))
