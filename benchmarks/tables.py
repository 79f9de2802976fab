"""The records as tables in pages: `python -m benchmarks.tables [PAGE ...]`, of `PAGES`, or all.

A page of docs has what a user needs, a page beside the benchmarks the rest. What stands between a page's two markers
is a function of JSON files in `benchmarks/results`, and so is whether a goal is met. The goals on a GPU are in the
sections of `benchmarks.performance`; a record of tiny shapes or of a CPU is refused there.
"""

import argparse
import importlib
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT, SECTIONS
from benchmarks.harness.record import counts, find
from benchmarks.science import quality_tables
from benchmarks.science.quality_tables import markdown

GPU = RESULTS / "gpu"
DOCS, HERE = ROOT / "docs", ROOT / "benchmarks"
PAGES: dict[str, Sequence[Path]] = {
    "objective": [HERE / "science" / "alpha.md", HERE / "performance" / "objective.md"],
    "quality": [DOCS / "quality.md", HERE / "science" / "quality.md"],
    "prune": [DOCS / "prune.md"],
    "lora": [HERE / "lora.md"],
    "find_lr": [HERE / "find_lr.md"],
    "gpu": [DOCS / "performance.md", HERE / "performance" / "gpu.md"],
}
COLUMNS = {
    "tflops": "TFLOP/s",
    "gb_per_second": "GB/s",
    "tokens_a_second": "tokens/s",
    "rate": "of cross-entropy's rate",
    "seconds_a_call": "seconds",
    "over_cross_entropy": "time over cross-entropy's",
    "ours_over_it": "kdtrain's time over its",
    "time": "time over bf16's",
    "peak_gib": "peak GiB",
    "extra_gib": "GiB beyond its inputs",
    "memory": "memory over bf16's",
    "last_loss": "last loss",
    "switches": "switches",
    "switch_ms": "a switch, ms",
    "snapshot_ms": "a snapshot, ms",
    "built_over_bare": "of the bare forward's rate",
    "built_over_asked": "of its teacher's rate",
    "bytes_a_token.total": "bytes per token",
    "speed_up": "of sparse-12's time",
    "cost": "of a step's time",
    "stall": "stall, s",
    "total": "until published, s",
    "share_percent": "% of the training time",
    "made_loss": "validation loss",
    "shipped_loss": "of the teacher that ships",
}
"""Columns of the tables, by place; a section's table has those that one of its figures has."""
ROUNDS = {
    **{"rate": (0, -1), "over_cross_entropy": (-1, 0), "ours_over_it": (1, -1), "time": (-1, 0), "cost": (0, -1)},
    **{"built_over_bare": (0, -1), "built_over_asked": (1, -1), "speed_up": (-1, 0), "of_flops": (-1, 0)},
}
"""Of each ratio, the two sides of `seconds` whose rounds it is the median of."""
LARGE = 32_000
"""The vocabulary from which on the goals against cross-entropy hold."""
TIME, MEMORY, STEP, ONLINE, MATERIALISED = 1.05, 1.0, 0.97, 0.95, 1 / 20
TARGETS = {"sparse 12": "kdtrain-sparse-12", "sparse 50": "kdtrain-sparse-50", "dense": "kdtrain-dense"}
PAIRS = {"TRL": ("kdtrain-jsd", "trl-jsd"), "Liger": ("kdtrain-jsd-online", "liger-jsd")}
TYPES = {"float32": (4, "fp32"), "bfloat16": (2, "bf16")}


def main() -> int:
    """Fill the pages that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(PAGES)}; all when left out")
    names = parser.parse_args().tables or [*PAGES]
    if unknown := set(names) - PAGES.keys():
        parser.error(f"no table {', '.join(sorted(unknown))}; there are {', '.join(PAGES)}")
    for name in names:
        for page, text in filled(name).items():
            page.write_text(text, encoding="utf-8")
    return 0


def filled(name: str) -> dict[Path, str]:
    """Return the pages of one kind of record, with its tables as the records have them."""
    return placed(current(name), PAGES[name])


def placed(blocks: Mapping[str, str], pages: Sequence[Path]) -> dict[Path, str]:
    """Return the texts of `pages`, with each block between its markers in the first page that has them.

    Links are relative to that page. ValueError: no page has the markers of a block.
    """
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    for name, block in blocks.items():
        page = next((page for page, text in texts.items() if f"<!-- {name} -->" in text), pages[0])
        linked = block.replace("](../benchmarks/", f"]({os.path.relpath(HERE, page.parent)}/")
        texts[page] = fill(texts[page], linked, name)
    return texts


def current(name: str) -> dict[str, str]:
    """Return the tables of the records that exist, by their markers."""
    if name == "quality":
        return quality_tables.blocks(_record("quality"))
    if name == "gpu":
        found = gpu_records()
        alone = {f"gpu-{each}": "\n".join(_section(each, found[each])) for each in ("step", "fp8")}
        return {"gpu-table": gpu(found)} | alone
    if name == "prune":
        return {"prune-table": prune(_record("prune"))}
    if name == "lora":
        return {"lora-table": lora(_record("lora")), "variants-table": variants(_record("lora"))}
    if name == "find_lr":
        return {"find-lr-table": find_lr(_record("find_lr"))}
    return {"objective-table": objective(_record("objective"), _record("step")), "alpha-table": alpha(_record("alpha"))}


def _record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def fill(page: str, block: str, name: str) -> str:
    """Replace in `page` the text between the markers `name` by `block`. ValueError: it has none."""
    before, begin, rest = page.partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not (begin and end):
        raise ValueError(f"the page has no <!-- {name} --> followed by <!-- /{name} -->; add them where it belongs")
    return f"{before}{begin}\n{block}\n{end}{after}"


def prune(record: dict[str, Any]) -> str:
    """Tabulate the losses of the beginnings of a student, before and after distillation."""
    settings, rows = record["settings"], list[list[str]]()
    for kind, row in record["kinds"].items():
        if row["after"] is not None:
            spread = "" if row["deviation"] is None else f" ± {row['deviation']:.3f}"
            losses = f"{row['before']:.2f}", f"{row['after']:.3f}{spread}"
            rows.append([kind, f"{row['parameters'] / 1e6:.2f} M", *losses, f"{row['lr']:g}", f"{row['seeds']}"])
    header = ["begins as", "parameters", "validation loss before", "after", "best rate", "seeds"]
    lines = [
        markdown(header, rows),
        "",
        f"{settings['steps']} steps of {settings['tokens_a_step']:,} tokens, from {settings['sequences']:,} sequences "
        f"of the standard library with 50 samples per token; scores from {settings['scored']} sequences. The teacher's "
        f"loss is {record['teacher']['validation_loss']:.3f}. Of rates a factor of two apart the best by the "
        f"first seed. {_measured(record, 'prune')}",
    ]
    return "\n".join(lines)


def alpha(record: dict[str, Any]) -> str:
    """Tabulate students at fixed alphas and by withheld text, in each regime.

    A last column has what auto costs against the better of two.
    """
    found: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for run in record["runs"]:
        found.setdefault(run["regime"], {}).setdefault(run["alpha"], {})[run["seed"]] = run
    rows, regrets, most = list[list[str]](), list[float](), -math.inf
    for regime, arms in found.items():
        means = {name: statistics.mean(each["loss"] for each in runs.values()) for name, runs in arms.items()}
        better = min(("0", "0.9"), key=means.__getitem__)
        seeds = arms["auto"].keys() & arms[better].keys()
        paired = [arms["auto"][seed]["loss"] - arms[better][seed]["loss"] for seed in seeds]
        regrets, most = [*regrets, statistics.mean(paired)], max(most, *paired)
        first = next(iter(arms["auto"].values()))
        kind, _, passes = regime.partition("-")
        weight = statistics.mean(each["alpha_mean"] for each in arms["auto"].values())
        cells = [_student(arms.get(name, {})) for name in ("0", "0.5", "0.9", "auto")]
        apart = f"{_signed(regrets[-1])}, at most {_signed(max(paired))}"
        rows.append([kind, passes, f"{first['teacher']:.3f}", *cells, f"{weight:.2f}", apart])
    header = ["teacher", "passes", "its loss", "α = 0", "0.5", "0.9", "auto", "mean α"]
    header.append("auto less the better of 0 and 0.9")
    mean = f"{_signed(statistics.mean(regrets))} nats in the mean of the regimes, {_signed(most)} at most in a run"
    text = f"Auto less the better of 0 and 0.9: {mean}. {_measured(record, 'alpha')}"
    return "\n".join([markdown(header, rows), "", text])


def _signed(value: float) -> str:
    """Format a difference in nats; 0 without a minus."""
    return f"{round(value, 3) + 0.0:+.3f}"


def _student(runs: Mapping[int, dict[str, Any]]) -> str:
    """Format the loss of the best students of an arm, that of the last ones where it is higher, and ECE.

    It is empty without runs.
    """
    if not runs:
        return ""
    best, last = (statistics.mean(each[name] for each in runs.values()) for name in ("loss", "last_loss"))
    shown = _spread([each["loss"] for each in runs.values()])
    shown += f", last {last:.3f}" if last > best + 0.005 else ""
    return f"{shown}; {statistics.mean(each['ece'] for each in runs.values()):.1%}"


def lora(record: dict[str, Any]) -> str:
    """Tabulate all weights, a frozen head and adapters beside each other."""
    settings, whole, rows = record["settings"], record["kinds"]["all weights"], list[list[str]]()
    for kind, row in record["kinds"].items():
        merged = row.get("merged_validation_loss")
        loss = _spread(row["losses"]) + (f" (merged {merged:.3f})" if merged else "")
        sizes = f"{row['trained_parameters']:,.0f}", f"{row['checkpoint_bytes'] / 1e6:.1f} MB"
        speed = row["tokens_per_second"] / whole["tokens_per_second"]
        rows.append([kind, loss, f"{row['lr']:g}", *sizes, f"{row['peak_memory_mb']:.0f} MiB", f"{speed:.2f}"])
    header = ["", "validation loss", "best rate", "trained", "a checkpoint", "peak memory", "tokens/s of all weights"]
    first = record["runs"][0]
    lines = [
        markdown(header, rows),
        "",
        f"The base has {first['begins_at']:.3f} on this text, its teacher {first['teacher']:.3f}. "
        f"{settings['steps']} steps of 16 x 256 tokens over {settings['sequences']:,} sequences; the base was trained "
        f"for {settings['base_steps']:,} steps on other text. Of rates a factor of two apart the best by the "
        f"first seed; mean ± standard deviation of {len(whole['losses'])} seeds. Of the loss and its gradients alone a "
        "frozen head takes:",
        "",
        markdown(
            ["vocabulary x width, tokens", "time of a trained head's", "peak memory above the inputs"],
            [
                [
                    f"{each['vocabulary']:,} x {each['width']:,}, {each['tokens']:,}",
                    f"{each['frozen']['seconds'] / each['trained']['seconds']:.2f}",
                    " against ".join(f"{each[k]['peak_mb_above_its_inputs']:,.0f} MiB" for k in ("frozen", "trained")),
                ]
                for each in record["head"]
            ],
        ),
        "",
        _measured(record, "lora"),
    ]
    return "\n".join(lines)


def variants(record: dict[str, Any]) -> str:
    """Tabulate other warm-ups and alphas, and adapters in the time of all weights."""
    usual = {kind: _spread(row["losses"]) for kind, row in record["kinds"].items()}
    kinds = [*dict.fromkeys(each["kind"] for each in record["variants"])]
    names = [*dict.fromkeys(each["variant"] for each in record["variants"])]
    found = {(each["kind"], each["variant"]): each for each in record["variants"]}
    rows = [["warm-up of 20 steps, alpha 0.9", *(usual[kind] for kind in kinds)]]
    for name in names:
        cells = [found.get((kind, name)) for kind in kinds]
        steps = record["settings"]["steps"]
        shown = []
        for each in cells:
            text = _spread(each["losses"]) if each else ""
            if each and each["steps"] != steps:
                text += f" ({each['steps']} steps)"
            shown.append(text)
        rows.append([name, *shown])
    return markdown(["", *kinds], rows)


def find_lr(record: dict[str, Any]) -> str:
    """Tabulate what the search suggests beside the best of seven rates, and beside a range test."""
    rows = []
    for kind, row in record["kinds"].items():
        grid = ", ".join(f"{each['lr']:g}: {_loss_of(each['loss'])}" for each in row["grid"])
        tests = row["range_test"]
        ranges = ", ".join(f"{each['steepest']:.1g} or {each['tenth_of_lowest']:.1g}" for each in tests) or "-"
        told = ", ".join(f"{each:.2g}" for each in row["suggested"])
        ratio = ", ".join(f"{each:.2f}" for each in row["ratio_to_the_best"])
        share = ", ".join(f"{each:.2f}" for each in row["share_of_a_run"])
        rows.append([kind, f"{row['best_of_seven']:g}", told, ratio, share, ranges, grid])
    header = [
        "",
        "best of seven",
        "find-lr",
        "of the best",
        "cost, runs",
        "a range test",
        "validation losses of the seven",
    ]
    settings = record["settings"]
    lines = [
        markdown(header, rows),
        "",
        f"Runs of {settings['steps']} steps of {settings['tokens_a_step']:,} tokens, students of 1 M parameters, "
        f"{settings['seeds']} seed{'s' if settings['seeds'] > 1 else ''}; a range test suggests where the loss falls "
        "fastest, or a tenth of the rate where it is lowest.",
        "",
        _measured(record, "find_lr"),
    ]
    return "\n".join(lines)


def _spread(losses: list[float]) -> str:
    deviation = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
    return f"{statistics.mean(losses):.3f}{deviation}"


def _loss_of(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.3f}"


def _measured(record: dict[str, Any], name: str) -> str:
    """Name the precision, machine and date of a record, and the file with all numbers."""
    of = record["environment"]
    return (
        f"{of['precision']} on {of['cpu']}, torch {of['torch']}, {of['date']}; all runs are in "
        f"[benchmarks/results/{name}.json](../benchmarks/results/{name}.json)."
    )


def gpu_records(folder: Path = GPU) -> dict[str, dict[str, Any]]:
    """Read the records that exist, by section. ValueError: one says nothing about a GPU."""
    found = {}
    for name in SECTIONS:
        path = folder / f"{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text())
            if not counts(found[name]):
                raise ValueError(f"{path} is of tiny shapes or of a CPU, and no result")
    return found


def gpu(found: Mapping[str, dict[str, Any]]) -> str:
    """Write the page of performance: the goals with a figure, one line on the others, and the figures by section."""
    lines, verdicts, open_goals = [], [], {}
    for name in SECTIONS:
        goals = importlib.import_module(f"benchmarks.performance.{name}").GOALS
        for goal in goals if name in found else ():
            value = find(found[name]["figures"], goal.figure)
            if value is not None:
                side, _, place = goal.figure.partition(".")
                figure = found[name]["figures"][side]
                rounds = len(next(iter(figure.get("seconds", {"": ""}).values())))
                verdicts.append(goal.verdict(value, 2 * (deviation(figure, place) or 0) / max(rounds, 1) ** 0.5))
                bound = f"≥ {number(goal.least)}" if goal.least is not None else f"≤ {number(goal.most)}"
                shown = verdicts[-1].replace("missed", "**missed**")
                lines.append(f"| {name} | {goal.what} | {bound} | {cell(figure, place)} | {shown} |")
        known = sum(line.startswith(f"| {name} |") for line in lines)
        if len(goals) > known or name not in found:
            open_goals[name] = len(goals) - known
    if lines:
        lines = ["| section | what | goal | figure | |", "|---|---|--:|--:|---|", *lines, ""]
        counted = ", ".join(f"{verdicts.count(each)} {each}" for each in ("met", "missed", "too close to tell"))
        lines += [f"Of these goals: {counted}. ± is the standard deviation over the rounds of a figure; a goal within"]
        lines += ["two standard errors of it is too close to tell.", ""]
    if open_goals:
        each = ", ".join(f"{name} ({count})" if count else name for name, count in open_goals.items())
        lines += [
            f"Not measured: {each}; in brackets the number of goals (`GOALS` of the section). "
            "`python -m benchmarks.performance all` on a GPU measures them."
        ]
    for name, record in found.items():
        lines += ["", *_section(name, record)]
    return "\n".join(lines)


def _section(name: str, record: dict[str, Any]) -> list[str]:
    """Write the figures of one section, and the machine and versions of their measurement."""
    of, figures = record["machine"], record["figures"]
    places = [place for place in COLUMNS if any(find(figure, place) is not None for figure in figures.values())]
    rows = {name: [cell(figure, place) for place in places] for name, figure in figures.items()}
    lines = [f"**{name}**", ""]
    if places:
        shown = [[name, *cells] for name, cells in rows.items() if {*cells} != {"-"}]
        lines += [markdown(["", *(COLUMNS[place] for place in places)], shown), ""]
    notes = [f"nothing was compiled: {record['uncompiled']}"] if record["uncompiled"] else []
    reasons = {"failed": "", "missing": "", "does_not_fit": "", "wrong": "withdrawn, ", "note": ""}
    sides: dict[str, list[str]] = {}
    for side, figure in figures.items():
        for key in (each for each in reasons if each in figure):
            sides.setdefault(f"{reasons[key]}{figure[key]}", []).append(side)
    sides |= {"not measured yet": record["left"]} if record["left"] else {}
    notes += [f"{', '.join(each)}: {note}" for note, each in sides.items()]
    lines += [*(f"- {note}" for note in notes), *([""] if notes else [])]
    commits = ", ".join(sorted({str(each) for each in record["commits"].values()}))
    return [
        *lines,
        f"{of['device']}, driver {of['driver']}, torch {of['libraries']['torch']}, commit {commits}, {record['date']}: "
        f"[{name}.json](../benchmarks/results/gpu/{name}.json).",
    ]


def cell(figure: Mapping[str, Any], place: str) -> str:
    """Format a number of a figure, and its standard deviation over the rounds where it has one."""
    value, spread = find(figure, place), deviation(figure, place)
    return number(value) + ("" if value is None or spread is None else f" ± {number(float(f'{spread:.2g}'))}")


def deviation(figure: Mapping[str, Any], place: str) -> float | None:
    """Compute the standard deviation over its rounds of a ratio or of a rate.

    None: another number, or one round.
    """
    value, sides = find(figure, place), [*figure.get("seconds", {}).values()]
    if place in ROUNDS and len(sides) > 1:
        first, second = (sides[number] for number in ROUNDS[place])
        each = [a / b for a, b in zip(first, second, strict=True)]
    elif place in ("tokens_a_second", "tflops", "seconds_a_call") and sides:
        each = [1 / seconds for seconds in sides[-1]]
    else:
        return None
    if value is None or len(each) < 2:
        return None
    spread = statistics.stdev(each)
    return spread if place == "cost" else value * spread / statistics.median(each)


def number(value: float | None) -> str:
    """Format four significant digits; integers only for values that are integers."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1e4 or float(value).is_integer() else f"{value:.4g}"


def objective(loss: Mapping[str, Any], step: Mapping[str, Any]) -> str:
    """Write the tables of the objective alone and of whole steps, and the goals."""
    machine, students = loss["machine"], step["figures"]
    rows = [row for row in loss["figures"].values() if "sides" in row]
    compared = [row for row in rows if "cross-entropy" in row["sides"]]
    lines = [
        f"{machine['device']} ({machine['capability']}), {machine['threads']} threads, torch "
        f"{machine['libraries']['torch']}; medians of {loss['settings']['repetitions']}, "
        "sides alternating in one process.",
        "",
        "Time and peak memory over compiled cross-entropy's; against TRL and Liger-Kernel the time of the same work.",
        "",
        "| N, D, V | | 3 products | sparse 12 | sparse 50 | dense | top-k, PyTorch | over TRL | over Liger |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
        *(_loss(row) for row in compared),
        "",
        "| student | cached / cross-entropy | learned T / cross-entropy | over online | by FLOPs |",
        "|---|--:|--:|--:|--:|",
        *(_step(name, each) for name, each in students.items()),
        "",
        *_goals(rows, students),
    ]
    return "\n".join(lines)


def _loss(row: Mapping[str, Any]) -> str:
    sides, base = row["sides"], row["sides"]["cross-entropy"]
    names, keys = ("products", *TARGETS.values(), "top-k-renormalized-50"), ("seconds", "peak_mib")
    cells = [", ".join(_ratio(sides[name], base, key) for key in keys) for name in names]
    shape = f"{row['tokens']:,}, {row['width']:,}, {row['vocabulary']:,}"
    peers = [_ratio(sides[own], sides[other], "seconds") for own, other in PAIRS.values()]
    return f"| {shape} | {TYPES[row['dtype']][1]} | {' | '.join([*cells, *peers])} |"


def _ratio(side: Mapping[str, Any], base: Mapping[str, Any], key: str) -> str:
    if key in side and key in base:
        return f"{side[key] / base[key]:.2f}"
    return "does not fit" if "does_not_fit" in {*side, *base} else "-"


def _step(name: str, found: Mapping[str, Any]) -> str:
    figures = [found["cached_over_cross_entropy"], found["likelihood_over_cross_entropy"]]
    figures += [found["speed_up_over_online"], found["speed_up_of_the_flops"]]
    what = f"{name}: {found['parameters'] / 1e6:.0f} M, V {found['vocabulary']:,}, {found['precision']}"
    return f"| {what} | {' | '.join(f'{each:.3f}' for each in figures)} |"


def _goals(rows: list[dict[str, Any]], students: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line a goal: in how many cases it is met, and those that miss it."""
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
        cases = {
            _name(row): row["sides"]["kdtrain-sparse-12"]["peak_mib"]
            * (2**20 / (2 * row["tokens"] * row["vocabulary"] * width(row)))
            for row in rows
            if "cross-entropy" not in row["sides"]
        }
        yield _verdict(f"At most one twentieth of the logits and their gradient {what}", cases, MATERIALISED)
    cases = {name: found["cached_over_cross_entropy"] for name, found in students.items()}
    yield _verdict(f"Whole step from a cache: at least {STEP} of cross-entropy's rate", cases, STEP, least=True)
    cases = {name: found["speed_up_over_online"] / found["speed_up_of_the_flops"] for name, found in students.items()}
    yield _verdict(f"Over an online teacher: at least {ONLINE} of what the FLOPs allow", cases, ONLINE, least=True)


def _name(row: Mapping[str, Any]) -> str:
    return f"({row['tokens']:,}, {row['width']:,}, {row['vocabulary']:,}) {TYPES[row['dtype']][1]}"


def _verdict(what: str, cases: Mapping[str, float], bound: float, *, least: bool = False) -> str:
    missed = {name: value for name, value in cases.items() if (value < bound if least else value > bound)}
    said = "; ".join(f"{name}: {value:.3f}" for name, value in missed.items())
    return f"- {what}: {len(cases) - len(missed)} of {len(cases)} met." + (f" **Missed**: {said}." if missed else "")


if __name__ == "__main__":
    sys.exit(main())
