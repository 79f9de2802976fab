"""The page of `kdtrain report`: what the template `page.html` is filled with.

Everything in a run may be anyone's: what the template prints is escaped and cut, curves are thinned, and the page
forbids itself to load anything. A cache is described from its own manifest, if it is still where the run read it and
has the same digest.
"""

import io
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kdtrain.cache.tools.facts import kept_facts
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.monitor.facts import evaluations
from kdtrain.monitor.record import lines
from kdtrain.outputs import OutFolder
from kdtrain.plugins.papers import figures
from kdtrain.plugins.papers.figures import COLUMN, GREY
from kdtrain.plugins.papers.groups import (
    Group,
    full_table,
    interventions,
    notes,
    outcome,
    read_groups,
    refuse_existing,
)
from kdtrain.plugins.papers.runs import LoggedRun
from kdtrain.tables import Table, counted

MOST_BYTES = 2_000_000
"""Most bytes of a page."""
CURVES = (
    *("validation/loss", "loss_avg", "validation/kl", "validation/ece"),
    *("validation/accuracy", "T", "alpha", "lr", "tok/s"),
)
_MOST_CACHES = 50
"""Most caches of a mixture that a page describes."""
_EVENTS, _PROMPTS, _SAMPLED, _TEXT = 12, 3, 8, 600
"""Most events of a run, prompts, runs beside a prompt, and characters of a prompt."""
_COLOURS = {
    **{"#0072b2": "--_blue", "#d55e00": "--_orange", "#009e73": "--_green", "#56b4e9": "--_sky", "#cc79a7": "--_pink"},
    **{"#e69f00": "--_amber", "#999999": "--_grey", "#b0b0b0": "--_line", "#000000": "--_ink"},
}
"""The colours of a figure, which the page has in a light and a dark shade."""


def write(config: Any) -> int:
    """Write the page of a `ReportConfig`. UsageError, RunError: as `main` of the plugin."""
    refuse_existing(config.out, config.overwrite)
    groups = read_groups(config.runs)
    text = page(groups, config.title)
    if len(text.encode()) > MOST_BYTES:
        raise UsageError(f"a page about {len(config.runs)} runs would have more than 2 MB; name fewer")
    OutFolder(config.out.parent).publish(config.out.name, text, "report")
    size = len(text.encode()) // 1024
    runs = sum(len(each.runs) for each in groups)
    record = {"page": str(config.out), "KiB": size, "runs": runs}
    config.show([f"{config.out}: {counted(runs, 'run')}, {size} KiB"], record)
    return 0


def page(groups: Sequence[Group], title: str) -> str:
    """Render the page about `groups` as HTML."""
    environment = Environment(
        loader=PackageLoader("kdtrain.plugins.papers", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=cut,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cut"] = cut
    runs = [run for group in groups for run in group.runs]
    handles = figures.legend_of(groups)
    legend = figures.Figure(figsize=(COLUMN, 0.19 * len(handles) + 0.05))
    legend.legend(handles=handles, loc="center left", frameon=False, fontsize=8, borderaxespad=0, handlelength=4)
    curves = []
    for name in CURVES:
        if any(len(run.record.curve(name)) > 1 for run in runs):
            made, panels = figures.figure(COLUMN, 2.3, 1, 1)
            figures.panel(panels[0, 0], groups, "tokens", name)
            curves.append(_svg(made, name))
    if (drawn := figures.rounds(runs)) is not None:
        curves.append(_svg(drawn, "rounds"))
    return environment.get_template("page.html").render(
        title=title,
        written=f"{counted(len(runs), 'run')}, written {time.strftime('%Y-%m-%d %H:%M')}",
        result=full_table(groups),
        outcome=list(outcome(groups)),
        notes=notes(groups),
        evaluations=list(evaluations({**each, "student": run.name} for run in runs for each in run.record.evaluations)),
        run_table=_run_table(runs),
        caches=_caches(runs),
        curves=curves,
        legend=_svg(legend, "legend"),
        reliability=None if (drawn := draw_reliability(groups)) is None else _svg(drawn, "reliability"),
        prompts=_prompts(runs),
        interventions=_interventions(runs),
        limits=_limits(groups),
    )


def cut(value: Any, most: int = _TEXT) -> Any:
    """Prepare a text of unknown origin for the page: shorten it and remove control characters; leave HTML as it is."""
    if hasattr(value, "__html__"):
        return value
    text = "\n".join(map(printable, str(value)[: most + 1].split("\n")))
    return text if len(str(value)) <= most else f"{text[:most]}…"


def _run_table(runs: Sequence[LoggedRun]) -> Table:
    rows = []
    for run in runs:
        environment = run.record.environment
        ranks = run.record.environment.get("ranks", 1)
        libraries = environment.get("libraries")
        libraries = libraries if isinstance(libraries, dict) else {}
        versions = ", ".join(f"{name} {libraries.get(name)}" for name in ("kdtrain", "torch") if libraries.get(name))
        over = "1 rank" if ranks == 1 else f"{ranks} ranks"
        machine = f"{environment.get('mode', '-')} on {environment.get('device', '-')}, {over}"
        objective = "cross-entropy" if run.options.get("alpha") == 0 else "distillation"
        objective = (run.record.result or {}).get("objective") or objective
        rows.append([run.name, run.student, str(objective), str(run.seed), machine, versions, run.status])
    return Table.of(("run", "student", "objective", "seed", "machine", "versions", "how it ended"), rows)


def _caches(runs: Sequence[LoggedRun]) -> list[dict[str, Any]]:
    """Describe each cache that the runs read, for the page."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run.cache is None or run.cache in found:
            continue
        path = run.options.get("cache")
        environment = run.record.environment
        aligned, mixed = environment.get("alignment"), environment.get("caches")
        digest = str(aligned.get("cache")) if isinstance(aligned, dict) else run.cache
        members: list[Any] = mixed if isinstance(mixed, list) else [{"cache": path or run.folder / "data"}]
        members = [{"digest": digest, **each} for each in members[:_MOST_CACHES] if isinstance(each, dict)]
        named = " + ".join(map(str, path)) if isinstance(path, list) else path
        found[run.cache] = {
            "name": named or "text packed by the run",
            "digest": digest[:16],
            "users": ", ".join(each.name for each in runs if each.cache == run.cache),
            "aligned": isinstance(aligned, dict),
            "members": [
                (f"{each['name']}: {each.get('share')} of the draws" if "name" in each else "", _described(each))
                for each in members
            ],
        }
    return list(found.values())


def _described(cache: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a cache's description, or the reason why there is none."""
    try:
        parts = kept_facts(str(cache.get("cache")), str(cache["digest"]))
    except (UsageError, RunError, OSError, ValueError) as error:
        return {"missing": f"It is no longer there to be described: {printable(str(error))[:200]}", "parts": []}
    if parts is None:
        return {"missing": "Another cache lies there now; this one is known by its digest alone.", "parts": []}
    return {"missing": "", "parts": parts}


def _samples(folder: Path) -> list[dict[str, Any]]:
    """Return the last texts that the run in `folder` sampled, each with `step`. OSError, ValueError: as `lines`."""
    last: list[dict[str, Any]] = []
    for _, record in lines(folder / "samples.jsonl"):
        if record is not None:
            last = [*(last if last and last[0]["step"] == record["step"] else []), record][:8]
    return last


def draw_reliability(groups: Sequence[Group]) -> Any:
    """Draw accuracy against confidence at the last validation, the seeds of a group together; return None without data.

    Bins with less than a thousandth of the tokens are left out: a few tokens make no share.
    """
    made, [[axes]] = figures.figure(COLUMN, 3.2, 1, 1)
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1.2)
    drawn = False
    for group, (color, marker, line) in zip(groups, figures.looks(groups), strict=True):
        diagrams = [run.record.calibration for run in group.runs if run.record.calibration]
        bins = figures.pooled([each for each in diagrams if len(each) == len(diagrams[0])])
        least = sum(each["tokens"] for each in bins) / 1000
        points = [(each["confidence"], each["accuracy"]) for each in bins if each["tokens"] > max(least, 0)]
        if points:
            drawn = True
            look: dict[str, Any] = {"marker": marker, "markersize": 4, "linestyle": line, "linewidth": 1.4}
            axes.plot(*zip(*points, strict=True), color=color, **look)
    figures.finish(axes, "Calibration, last validation", "the student's confidence", "share that is right")
    figures.small(axes)
    return made if drawn else None


def _svg(made: Any, name: str) -> str:
    """Render a figure as inline SVG in the colours of the page."""
    file = io.BytesIO()
    figures.save(made, file, kind="svg", salt=name, text=True, transparent=True)
    text = file.getvalue().decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{name}">', text)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    return re.sub(r"(?<=[: ])#[0-9a-f]{6}", lambda found: f"var({_COLOURS.get(found[0], '--_ink')})", text)


def _prompts(runs: Sequence[LoggedRun]) -> list[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Return prompts with the last texts of the runs that have them, the prompts of most runs first: they compare."""
    texts: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for run in runs:
        try:
            rows = _samples(run.folder)
        except (OSError, ValueError):
            continue
        for row in rows:
            texts.setdefault(str(row.get("prompt"))[:_TEXT], []).append((run.name, row))
    chosen = sorted(texts.items(), key=lambda pair: -len(pair[1]))[:_PROMPTS]
    return [(prompt, found[:_SAMPLED]) for prompt, found in chosen]


def _interventions(runs: Sequence[LoggedRun]) -> Table | None:
    rows = []
    for run in runs:
        found = interventions(run)
        for each in found[:_EVENTS]:
            message = each.details.get("message") or ", ".join(
                f"{name} {value}" for name, value in list(each.details.items())[:6] if name != "time"
            )
            rows.append((run.name, f"{each.step:,}", each.event[:40], each.level[:20], str(message)))
        if len(found) > _EVENTS:
            kinds = Counter(each.event for each in found).most_common(6)
            rows.append((run.name, "", "in all", "", ", ".join(f"{number} {kind}" for kind, number in kinds)))
    return Table.of(("run", "step", "event", "level", "what"), rows) if rows else None


def _limits(groups: Sequence[Group]) -> list[str]:
    """List what no number on the page shows."""
    runs = [run for group in groups for run in group.runs]
    seeds = max(len({str(run.seed) for run in group.runs}) for group in groups)
    caches = len({run.cache for run in runs})
    on_cpu = any("cpu" in str(run.record.environment.get("device")) for run in runs)
    rolled, quantized = (any(run.numbers[name] for run in runs) for name in ("rollbacks", "quantized_share"))
    emulated = on_cpu and quantized
    known = {
        "The runs chose their best checkpoint by their validation split, whose numbers flatter them.": True,
        "Time is that of optimizer steps: without validation, checkpoints, compiling and pauses, and without the "
        "teacher, which ran once for the cache. Runs on busy or different machines do not compare.": True,
        "Nothing here is a downstream task: no answers, no code that runs and no long text were judged.": True,
        "The training loss of distillation weighs divergence and cross-entropy; compare the validation loss.": True,
        "Every setup has one seed; any difference on this page may be the luck of a seed.": seeds < 2,
        "The runs read different caches: validation losses compare only over the same text.": caches > 1,
        "Steps that a rollback took back are not in the curves, nor in tokens and time.": rolled,
        "Quantised steps on a CPU are emulated: the loss is that of the format, the speed is not.": emulated,
    }
    return [line for line, holds in known.items() if holds]
