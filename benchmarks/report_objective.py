"""The records of `objective.py` and `objective_step.py` as the tables of docs/objective.md.

`python benchmarks/report_objective.py` fills the page: everything between its two markers is a function of the JSON
files in `benchmarks/results`, and so is whether a goal is met.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from report_demo import fill

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "objective.md"
MARKERS = "<!-- objective-table -->", "<!-- /objective-table -->"
LARGE = 32_000
"""The vocabulary from which on the goals against cross-entropy hold."""
TIME, MEMORY, STEP, ONLINE, MATERIALISED = 1.05, 1.0, 0.97, 0.95, 1 / 20
SIDES = {"sparse 12": "kdtrain-sparse-12", "sparse 50": "kdtrain-sparse-50", "dense": "kdtrain-dense"}
PAIRS = {"TRL": ("kdtrain-jsd", "trl-jsd"), "Liger": ("kdtrain-jsd-online", "liger-jsd")}
TYPES = {"float32": (4, "fp32"), "bfloat16": (2, "bf16")}


def main() -> None:
    """Fill the page."""
    PAGE.write_text(fill(PAGE.read_text(), markdown(*records()), MARKERS))


def records() -> tuple[dict[str, Any], dict[str, Any]]:
    """What `objective.py` and `objective_step.py` have written."""
    return tuple(json.loads((RESULTS / f"{name}.json").read_text()) for name in ("objective", "objective-step"))  # type: ignore[return-value]


def markdown(objective: Mapping[str, Any], step: Mapping[str, Any]) -> str:
    """Both tables and the goals."""
    machine, rows = objective["machine"], objective["rows"]
    compared = [row for row in rows if "cross-entropy" in row["sides"]]
    lines = [
        f"{machine['processor']} ({machine['capability']}), {machine['threads']} threads, torch "
        f"{machine['libraries']['torch']}; medians of {machine['repetitions']}, sides alternating in one process.",
        "",
        "Time and peak memory over compiled cross-entropy's; against TRL and Liger-Kernel the time of the same work.",
        "",
        "| N, D, V | | 3 products | sparse 12 | sparse 50 | dense | top-k, PyTorch | over TRL | over Liger |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
        *(_row(row) for row in compared),
        "",
        "| student | cached / cross-entropy | learned T / cross-entropy | over online | by FLOPs |",
        "|---|--:|--:|--:|--:|",
        *(_step(name, each) for name, each in step["students"].items()),
        "",
        *_goals(rows, step["students"]),
    ]
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> str:
    sides, base = row["sides"], row["sides"]["cross-entropy"]
    cells = [_pair(sides[name], base) for name in ("products", *SIDES.values(), "top-k-renormalized-50")]
    shape = f"{row['tokens']:,}, {row['width']:,}, {row['vocabulary']:,}"
    peers = [_ratio(sides[own], sides[other], "seconds") for own, other in PAIRS.values()]
    return f"| {shape} | {TYPES[row['dtype']][1]} | {' | '.join([*cells, *peers])} |"


def _pair(side: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    return f"{_ratio(side, base, 'seconds')}, {_ratio(side, base, 'peak_mib')}"


def _ratio(side: Mapping[str, Any], base: Mapping[str, Any], key: str) -> str:
    if key in side and key in base:
        return f"{side[key] / base[key]:.2f}"
    return next((f"{word}" for word in ("does not fit",) if "does_not_fit" in {*side, *base}), "-")


def _step(name: str, found: Mapping[str, Any]) -> str:
    figures = [found["cached_over_cross_entropy"], found["likelihood_over_cross_entropy"]]
    figures += [found["speed_up_over_online"], found["speed_up_of_the_flops"]]
    what = f"{name}: {found['parameters'] / 1e6:.0f} M, V {found['vocabulary']:,}, {found['precision']}"
    return f"| {what} | {' | '.join(f'{each:.3f}' for each in figures)} |"


def _goals(rows: list[dict[str, Any]], students: Mapping[str, Any]) -> Iterator[str]:
    """One line a goal: in how many cases it is met, and those that miss it."""
    for key, bound, what in (("seconds", TIME, "time"), ("peak_mib", MEMORY, "peak memory")):
        cases = {
            f"{_name(row)} K={side[10:].rpartition('-')[2]}": row["sides"][side][key]
            / row["sides"]["cross-entropy"][key]
            for row in rows
            if row["vocabulary"] >= LARGE and "cross-entropy" in row["sides"]
            for side in ("kdtrain-sparse-12", "kdtrain-sparse-50")
        }
        yield _verdict(f"Sparse, V ≥ {LARGE:,}: at most {bound:.2f} of cross-entropy's {what}", cases, bound)
    for peer, (own, other) in PAIRS.items():
        cases = {
            _name(row): row["sides"][own]["seconds"] / row["sides"][other]["seconds"]
            for row in rows
            if "seconds" in row["sides"].get(other, {})
        }
        yield _verdict(f"Faster than {peer} at the same work", cases, 1.0)
    for what, width in (("in fp32", lambda row: 4), ("in the run's dtype", lambda row: TYPES[row["dtype"]][0])):
        cases = {_name(row): _of_materialised(row, width(row)) for row in rows if "cross-entropy" not in row["sides"]}
        yield _verdict(f"At most one twentieth of the logits and their gradient {what}", cases, MATERIALISED)
    cases = {name: found["cached_over_cross_entropy"] for name, found in students.items()}
    yield _verdict(f"Whole step from a cache: at least {STEP} of cross-entropy's rate", cases, STEP, least=True)
    cases = {name: found["speed_up_over_online"] / found["speed_up_of_the_flops"] for name, found in students.items()}
    yield _verdict(f"Over an online teacher: at least {ONLINE} of what the FLOPs allow", cases, ONLINE, least=True)


def _of_materialised(row: Mapping[str, Any], width: int) -> float:
    """The peak over what logits and their gradient would take with numbers of `width` bytes."""
    return row["sides"]["kdtrain-sparse-12"]["peak_mib"] * 2**20 / (2 * row["tokens"] * row["vocabulary"] * width)


def _name(row: Mapping[str, Any]) -> str:
    return f"({row['tokens']:,}, {row['width']:,}, {row['vocabulary']:,}) {TYPES[row['dtype']][1]}"


def _verdict(what: str, cases: Mapping[str, float], bound: float, *, least: bool = False) -> str:
    missed = {name: value for name, value in cases.items() if (value < bound if least else value > bound)}
    said = "; ".join(f"{name}: {value:.3f}" for name, value in missed.items())
    return f"- {what}: {len(cases) - len(missed)} of {len(cases)} met." + (f" **Missed**: {said}." if missed else "")


if __name__ == "__main__":
    main()
