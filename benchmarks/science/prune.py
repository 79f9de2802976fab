"""Where a smaller student begins: fresh weights, copied layers, or a pruned teacher, before and after distillation.

    python -m benchmarks.science.prune                an hour on one core; the same command resumes it
    python -m benchmarks.science.prune --quick --out runs/prune-quick     two minutes, to see that it works

The shipped teacher of 5 M parameters becomes students of about 3 M and of about 2.5 M. All distil it from one cache of
its own text, by the real command, in as many steps over the same batches. Each beginning has rates of its own: all are
tried with the first seed, more where the best is at the edge, and the best, by validation loss, with the other seeds.
The seed decides fresh weights and the order of the data; what is copied or pruned is the same for all. Copied layers
have the teacher's width, so that their sizes are those that two and three layers give; where the scores choose the same
layers, there is one row.

What it gives up: one teacher of one size, a short distillation, and rates a factor of two apart.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.harness import RESULTS, ROOT, TEACHER, write, write_spec
from benchmarks.harness.command import Kdtrain, claim, environment, options
from benchmarks.harness.study import Study
from kdtrain.config.values import Options, option

WIDE = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4, "num_key_value_heads": 4}
NARROW = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3, "num_key_value_heads": 3}
SHAPES: dict[str, dict[str, Any]] = {
    "width-3m": NARROW | {"num_hidden_layers": 6},
    "depth-3m": WIDE | {"num_hidden_layers": 3},
    "width-2.5m": NARROW | {"num_hidden_layers": 6, "intermediate_size": 344},
    "depth-2.1m": WIDE | {"num_hidden_layers": 2},
}
COPIED = {"depth-3m": [0, 2, 5], "depth-2.1m": [0, 5]}
"""The layers that one copies without scores: the first, the last and one between."""
FRESH, GIVEN = (2e-3, 4e-3, 8e-3), (1e-3, 2e-3, 4e-3)
KINDS = {
    **{f"fresh {shape}": FRESH for shape in ("width-3m", "width-2.5m")},
    **{f"copied {shape}": GIVEN for shape in COPIED},
    **{f"pruned {shape}": GIVEN for shape in SHAPES},
}
"""A beginning and its rates."""


@dataclass(frozen=True, kw_only=True)
class PruneStudy(Options):
    """Compare beginnings of a student."""

    out: Path = Path("runs/prune")
    """The folder of cache, models and runs."""
    result: Path = RESULTS / "prune.json"
    """The record to write."""
    seeds: int = option(3, least=1)
    """Runs of each beginning at its best rate."""
    steps: int = option(150, least=1)
    """Steps of each run, of 2,048 tokens."""
    sequences: int = option(1200, least=1)
    """Sequences of the cache."""
    scored: int = option(128, least=1)
    """Sequences on which importance is scored."""
    quick: bool = False
    """Little text, few steps, one rate, one seed: to see that it works."""
    minutes: float = option(1e9, above=0)
    """After this time no further run begins; the same command goes on."""


def main(given: PruneStudy) -> None:
    """Run the study, and write its record."""
    given = replace(given, steps=4, sequences=64, scored=32, seeds=1) if given.quick else given
    settings = {name: vars(given)[name] for name in ("steps", "sequences", "scored", "seeds")}
    claim(given.out, settings)
    length = ("--seq-len", "256", "--validation-sequences", "64", "--num-sequences", f"{given.sequences}")
    caches = {"cache": ("--teacher", TEACHER, "--data", "stdlib", "--precision", "fp32", *length)}
    common = ("--batch-size", "8", "--warmup-steps", "20", "--precision", "fp32", "--no-compile", "--log-to", "none")
    common += ("--steps", f"{given.steps}", "--eval-freq", f"{given.steps}", "--checkpoint-freq", "100000")
    with Kdtrain() as kdtrain:
        study = Study(given.out, kdtrain, caches, common)
        students, layers = _students(study, given.scored)
        kinds = {kind: rates for kind, rates in KINDS.items() if kind in students}

        def run(name: str, entry: tuple[str, float, int]) -> dict[str, Any]:
            kind, rate, seed = entry
            words = ("--student", students[kind], "--lr", f"{rate}", "--seed", f"{seed}")
            answer, _ = study.train(name, *words, may_fail=True)
            found = json.loads((given.out / name / "environment.json").read_text())
            return {
                **{"kind": kind, "lr": rate, "seed": seed, "parameters": found["student"]["parameters"]},
                **{"before": answer.get("first_validation_loss"), "after": answer.get("best_validation_loss")},
                **{"teacher": answer.get("teacher_validation_loss"), "seconds": answer.get("seconds")},
            }

        tried = {kind: [*rates][: 1 if given.quick else None] for kind, rates in kinds.items()}

        def entry_of(kind: str, rate: float) -> tuple[str, tuple[str, float, int]]:
            return _name(kind, rate, 0), (kind, rate, 0)

        records, best = study.tuned(tried, entry_of, run, "after", given.minutes, not given.quick)
        again = {
            _name(kind, rate, seed): (kind, rate, seed)
            for seed in range(1, given.seeds)
            for kind, rate in best.items()
            if rate is not None
        }
        records += study.records(again, run, minutes=given.minutes)
    if not records:
        return
    record: dict[str, Any] = {
        "environment": environment(given.out / _name(*(records[0][name] for name in ("kind", "lr", "seed")))),
        "settings": {**settings, "tokens_a_step": 2048, "quick": given.quick},
        "left": sum(map(len, tried.values())) + len(kinds) * (given.seeds - 1) - len(records),
        "teacher": {"validation_loss": records[0]["teacher"]},
        "layers_by_scores": layers,
        "kinds": {kind: _row(kind, best[kind], records) for kind in kinds},
        "runs": records,
    }
    write(given.result, record)
    for kind, row in record["kinds"].items():
        print(kind, row)


def _students(study: Study, scored: int) -> tuple[dict[str, str], dict[str, list[int]]]:
    """The spec or folder of each beginning, made where it is missing, and the layers that the scores choose."""
    out, found, chosen = study.out, {}, {}
    for shape, config in SHAPES.items():
        like, pruned = out / f"{shape}.toml", out / f"pruned-{shape}"
        table = {"model_type": "llama", **config, "head_dim": 64, "max_position_embeddings": 1024}
        write_spec(like, ROOT / "teachers" / "stdlib-5m", {**table, "tie_word_embeddings": True})
        if not pruned.exists():
            words: tuple[str, ...] = ("--like", f"{like}", "--cache", f"{study.cache()}", "--precision", "fp32")
            words += ("--num-sequences", f"{scored}", "--allow-high-pruning-ratio")
            study.kdtrain("prune", TEACHER, *words, "--out", f"{pruned}")
        chosen[shape] = json.loads((pruned / "kdtrain.json").read_text())["pruned"]["layers"]
        found[f"fresh {shape}"] = f"{like}"
        if chosen[shape] != COPIED.get(shape):
            found[f"pruned {shape}"] = f"{pruned}"
    for shape, layers in COPIED.items():
        copied = out / f"copied-{shape}.toml"
        copied.write_text(f"init = 'teacher-layers'\nteacher = '{(ROOT / TEACHER).resolve()}'\nlayers = {layers}\n")
        found[f"copied {shape}"] = f"{copied}"
    return found, {shape: chosen[shape] for shape in COPIED}


def _name(kind: str, rate: float, seed: int) -> str:
    return f"{kind.replace(' ', '-')}-lr{rate:g}-{seed}"


def _row(kind: str, rate: float | None, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The table's row of a beginning: its runs at its best rate."""
    own = [each for each in records if (each["kind"], each["lr"]) == (kind, rate) and each["after"] is not None]
    losses, before = [each["after"] for each in own], [each["before"] for each in own]
    return {
        **{"lr": rate, "parameters": own[0]["parameters"] if own else None, "seeds": len(own)},
        **{"before": mean(before) if before else None, "after": mean(losses) if losses else None},
        **{"deviation": stdev(losses) if len(losses) > 1 else None, "losses": losses},
    }


if __name__ == "__main__":
    main(options(PruneStudy))
