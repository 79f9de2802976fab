"""Does `kdtrain find-lr` find the rate? Its suggestion beside the best of seven rates, and beside a range test.

    python -m benchmarks.science.find_lr              an hour and a half on one core; the same command resumes it
    python -m benchmarks.science.find_lr --quick --out runs/find-lr-quick       a few minutes, to see that it works

For each kind (cross-entropy and distillation of a fresh student, adapters beside a trained base) and seed the search
runs as a user would run it, from the default guess, and seven whole runs at rates a factor of two apart. The best of
the seven by validation loss, mean over seeds, is what the search should be within a factor of two of.

The range test (Smith, arXiv 1506.01186, as in fastai) raises the rate of AdamW from 1e-6 to 1 in one short run without
warm-up, and suggests where the loss falls fastest, or a tenth of the rate where it is lowest. It sees neither warm-up
nor what a rate does after more than a few steps.

What it gives up: small students, one batch size, one length of run.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.harness import RESULTS, ROOT, STUDENT, TEACHER, write
from benchmarks.harness.command import Kdtrain, claim, environment, options
from benchmarks.harness.study import Study
from benchmarks.science import docstrings
from kdtrain.config.values import Options, option

KINDS: dict[str, tuple[str, ...]] = {
    "cross-entropy": ("--student", STUDENT, "--alpha", "0"),
    "distillation": ("--student", STUDENT),
    "lora": ("--student", "BASE", "--lora-rank", "16"),
}
"""Options of each kind; BASE stands for the folder of the base."""
LOWEST = {"cross-entropy": 2.5e-4, "distillation": 2.5e-4, "lora": 5e-4}
RATES, BATCH, LENGTH = 7, 8, 256


@dataclass(frozen=True, kw_only=True)
class FindLrStudy(Options):
    """Compare find-lr with a grid of seven rates and with a range test."""

    out: Path = Path("runs/find-lr")
    """The folder of caches and runs."""
    result: Path = RESULTS / "find_lr.json"
    """The record to write."""
    kinds: tuple[str, ...] = option(tuple(KINDS), several=",")
    """Which kinds, joined with commas."""
    seeds: int = option(1, least=1)
    """Searches and runs of each rate."""
    steps: int = option(300, least=1)
    """Steps of a whole run."""
    rung_steps: int | None = option(None, least=2)
    """Steps of the first rung of a search; by default those of the command."""
    base_steps: int = option(800, least=1)
    """Steps of the base of adapters, by cross-entropy."""
    sequences: int = option(1200, least=1)
    """Sequences of the cache."""
    range_steps: int = option(200, least=10)
    """Steps of a range test."""
    quick: bool = False
    """Little text, few steps, one seed, no adapters: to see that it works."""
    minutes: float = option(1e9, above=0)
    """After this time no further run begins; the same command goes on."""


def main(given: FindLrStudy) -> None:
    """Run the study, and write its record."""
    quick = given.quick
    if quick:
        given = replace(given, steps=12, rung_steps=2, base_steps=20, sequences=100)
    settings = {name: vars(given)[name] for name in ("steps", "rung_steps", "base_steps", "sequences")}
    kinds, seeds = (("cross-entropy", "distillation"), 1) if quick else (given.kinds, given.seeds)
    claim(given.out, settings)
    text = ROOT / "docs" if quick else docstrings.write(given.out / "docstrings.jsonl")
    length = ("--seq-len", f"{LENGTH}", "--validation-sequences", "64")
    stdlib = ("--data", "stdlib", "--num-sequences", f"{given.sequences}", *length)
    others = ("--data", f"{text}", "--num-sequences", f"{given.sequences}", *length)
    caches = {name: ("--teacher", TEACHER, *words) for name, words in (("cache", stdlib), ("other", others))}
    common = ("--batch-size", f"{BATCH}", "--precision", "fp32", "--no-compile", "--steps", f"{given.steps}")
    rung = () if given.rung_steps is None else ("--rung-steps", f"{given.rung_steps}")
    with Kdtrain() as kdtrain:
        study = Study(given.out, kdtrain, caches, (*common, "--log-to", "none"))

        def words_of(kind: str, seed: int) -> tuple[str, ...]:
            if "BASE" in KINDS[kind] and not (given.out / "base" / "student").exists():
                base = ("--student", STUDENT, "--lr", "2e-3", "--steps", f"{given.base_steps}", "--alpha", "0")
                study.train("base", *base)
            own = (f"{given.out / 'base'}" if word == "BASE" else word for word in KINDS[kind])
            return (*own, "--seed", f"{seed}")

        def search(name: str, entry: tuple[str, int]) -> dict[str, Any]:
            kind, seed = entry
            cache = ("--cache", f"{study.cache(_cache(kind))}", "--out", f"{given.out / name}")
            found = kdtrain("find-lr", *cache, *common, *rung, *words_of(kind, seed))
            shown = {name: found[name] for name in ("guess", "guess_from", "rates", "suggestion", "cost")}
            return {"kind": kind, "seed": seed, **shown}

        def run(name: str, entry: tuple[str, float, int]) -> dict[str, Any]:
            kind, rate, seed = entry
            words = (*words_of(kind, seed), "--lr", f"{rate}")
            answer, _ = study.train(name, *words, cache=_cache(kind), may_fail=True)
            return {"kind": kind, "lr": rate, "seed": seed, "validation_loss": answer.get("best_validation_loss")}

        def probe(name: str, entry: tuple[str, int]) -> dict[str, Any]:
            kind, seed = entry
            alpha = 0.0 if kind == "cross-entropy" else 0.9
            tested = range_test(study.cache(_cache(kind)), alpha, 20 if quick else given.range_steps, seed)
            return {"kind": kind, "seed": seed, **tested}

        once = {"minutes": given.minutes}
        every = [(kind, seed) for kind in kinds for seed in range(seeds)]
        searches = study.records({f"find-{kind}-{seed}": (kind, seed) for kind, seed in every}, search, **once)
        grid = {f"{kind}-lr{rate:g}-{seed}": (kind, rate, seed) for kind, seed in every for rate in rates(kind)}
        runs = study.records(grid, run, **once)
        fresh = {f"range-{kind}-{seed}": (kind, seed) for kind, seed in every if "BASE" not in KINDS[kind]}
        ranges = study.records(fresh, probe, **once)
    record = {
        "environment": environment(next(given.out.glob("*-lr*-0"))),
        "settings": {**settings, "tokens_a_step": BATCH * LENGTH, "seeds": seeds, "quick": quick},
        "left": len(every) + len(grid) + len(fresh) - len(searches) - len(runs) - len(ranges),
        "kinds": {kind: _row(kind, searches, runs, ranges) for kind in kinds},
        "searches": searches,
        "runs": runs,
        "range_tests": ranges,
    }
    write(given.result, record)
    for kind, row in record["kinds"].items():
        print(kind, json.dumps(row))


def _cache(kind: str) -> str:
    """Adapters learn another text than that of their base."""
    return "other" if "BASE" in KINDS[kind] else "cache"


def rates(kind: str) -> list[float]:
    """The seven rates of a kind."""
    return [LOWEST[kind] * 2**number for number in range(RATES)]


def _row(
    kind: str, searches: list[dict[str, Any]], runs: list[dict[str, Any]], ranges: list[dict[str, Any]]
) -> dict[str, Any]:
    """The suggestions for a kind beside the best of its grid."""
    losses: dict[float, list[float]] = {}
    for each in runs:
        if each["kind"] == kind:
            losses.setdefault(each["lr"], []).append(each["validation_loss"] or math.inf)
    means = {rate: mean(found) for rate, found in losses.items()}
    best = min(means, key=lambda rate: means[rate], default=None)
    own = [each for each in searches if each["kind"] == kind]
    suggested = [each["suggestion"]["lr"] for each in own]
    return {
        "grid": [
            {"lr": rate, "loss": _finite(means[rate]), "losses": [*map(_finite, losses[rate])]} for rate in losses
        ],
        "best_of_seven": best,
        "spread_over_seeds": _finite(stdev(losses[best])) if best is not None and len(losses[best]) > 1 else None,
        "suggested": suggested,
        "between": [each["suggestion"]["between"] for each in own],
        "ratio_to_the_best": [rate / best for rate in suggested] if best else [],
        "within_a_factor_of_two": all(0.5 <= rate / best <= 2 for rate in suggested) if best else None,
        "share_of_a_run": [each["cost"]["share_of_the_run"] for each in own],
        "range_test": [
            {name: each[name] for name in ("seed", "steepest", "tenth_of_lowest")}
            for each in ranges
            if each["kind"] == kind
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def range_test(cache: Path, alpha: float, steps: int, seed: int) -> dict[str, Any]:
    """One run of a fresh student whose rate rises from 1e-6 to 1: rates, losses, and what readers of them suggest."""
    import torch
    from torch.utils.data import DataLoader

    import kdtrain as kd
    from kdtrain.models.loading import load_student
    from kdtrain.models.spec import read_spec

    torch.manual_seed(seed)
    data = kd.Cache(str(cache))
    model = load_student(read_spec(STUDENT), vocab_size=data.manifest.given.vocab_size, seed=seed, device="cpu")
    student = kd.Student(model, kd.DistillationLoss(alpha=alpha)).train()
    optimizer = torch.optim.AdamW(student.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    loader = DataLoader(data["train"], BATCH, shuffle=True, drop_last=True, collate_fn=kd.collate)
    batches = (batch for _ in range(steps) for batch in loader)
    tried, losses = [1e-6 ** (1 - step / (steps - 1)) for step in range(steps)], list[float]()
    for rate, batch in zip(tried, batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = student(**batch).loss
        if not torch.isfinite(loss) or (losses and loss > 4 * min(losses)):
            break
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"lr": tried[: len(losses)], "loss": losses, **read_range(tried, losses)}


def read_range(tried: Sequence[float], losses: Sequence[float]) -> dict[str, float]:
    """What fastai suggests: where the smoothed loss falls fastest, and a tenth of the rate where it is lowest."""
    smooth, average = list[float](), 0.0
    for number, loss in enumerate(losses, 1):
        average = 0.98 * average + 0.02 * loss
        smooth.append(average / (1 - 0.98**number))
    slopes = [after - before for before, after in pairwise(smooth)]
    steepest = min(range(len(slopes)), key=slopes.__getitem__)
    return {"steepest": tried[steepest], "tenth_of_lowest": tried[smooth.index(min(smooth))] / 10}


if __name__ == "__main__":
    main(options(FindLrStudy))
