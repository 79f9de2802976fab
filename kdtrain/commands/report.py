"""`kdtrain report`: one page about runs, to read and to send; without network, scripts or other files.

Everything in a run may be anyone's: text is escaped and cut, curves are thinned, and the page forbids itself to load
anything. A cache is described from its own manifest, if it is still where the run read it and has the same digest.
"""

import html
import io
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kdtrain.cache.format.manifest import read_manifest
from kdtrain.cache.read.local_store import cache_folder, kept_manifest
from kdtrain.cache.tools.facts import cache_facts, fidelity
from kdtrain.commands.compare import cell, notes
from kdtrain.commands.plot import drawing, refuse_existing
from kdtrain.config import ReportConfig
from kdtrain.config.values import flag
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.files import publish_text
from kdtrain.monitor.record import samples
from kdtrain.monitor.runs import MEASURES, Group, Run, differing, grouped, read_runs
from kdtrain.tables import facts_table, show

MOST_BYTES = 2_000_000
"""Most bytes of a page."""
CURVES = (
    "validation/loss",
    "loss_avg",
    "validation/kl",
    "validation/ece",
    "validation/accuracy",
    "T",
    "lr",
    "tok/s",
)
_MOST_CACHES = 50
"""Most caches of a mixture that a page describes."""
QUALITY = (
    *("best_validation_loss", "last_validation_loss", "bits_per_byte", "kl", "teacher_validation_loss"),
    *("teacher_bits_per_byte", "compared", "entropy_kept", "last_training_loss"),
)
CALIBRATION = ("ece", "accuracy", "temperature")
COST = ("tokens", "seconds", "tokens_per_second", "peak_memory_mb", "quantized_share", "rollbacks", "skipped_steps")
_TEXT, _EVENTS, _PROMPTS, _SAMPLED = 600, 12, 3, 8
"""Most characters of a text; most events of a run, prompts, and runs beside a prompt."""
_COLOURS = {
    "#0072b2": "--_blue",
    "#d55e00": "--_orange",
    "#009e73": "--_green",
    "#56b4e9": "--_sky",
    "#cc79a7": "--_pink",
    "#e69f00": "--_amber",
    "#999999": "--_grey",
    "#b0b0b0": "--_line",
    "#000000": "--_ink",
}
"""The colours of a figure, which the page has in a light and a dark shade."""

_STYLE = """
:root{--_ink:#1c1f23;--_soft:#5b636d;--_paper:#fff;--_panel:#f6f7f9;--_line:#d4d8de;--_mark:#8a4b00;--_blue:#0072b2;
--_orange:#d55e00;--_green:#009e73;--_sky:#2f8fc9;--_pink:#b8588c;--_amber:#b67d00;--_grey:#7a7a7a;
color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--_ink:#e7e9ec;--_soft:#a3abb5;--_paper:#15181c;--_panel:#1e2227;
--_line:#3a414a;--_mark:#f0b35a;--_blue:#4fb0ea;--_orange:#ff8a3d;--_green:#2fcb9b;--_sky:#8fd0f7;--_pink:#e79ac4;--_amber:#f0b429;
--_grey:#b3b3b3}}
*{box-sizing:border-box}body{margin:0;background:var(--_paper);color:var(--_ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1280px;margin:0 auto;padding:24px 16px 64px}h1{font-size:26px;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:36px 0 8px;border-bottom:1px solid var(--_line);padding-bottom:4px}
h3{font-size:15px;margin:16px 0 4px}
p,ul{margin:6px 0;max-width:75ch}ul{padding-left:20px}li{margin:3px 0;overflow-wrap:anywhere}.soft{color:var(--_soft)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:5px 14px 5px 0;border-bottom:1px solid var(--_line)}
thead th{font-weight:600;min-width:110px;max-width:240px;overflow-wrap:anywhere}
tbody th{font-weight:400;color:var(--_soft);min-width:110px}td{max-width:340px;overflow-wrap:anywhere}
td small{display:block;color:var(--_soft)}td small.beyond{color:var(--_mark);font-weight:600}
.curves{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:16px}
figure{margin:0;background:var(--_panel);border-radius:8px;padding:8px}svg{display:block;width:100%;height:auto;fill:var(--_ink)}
figure.legend{max-width:420px;margin:8px 0 16px}
.texts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,260px),1fr));gap:12px}
pre{margin:4px 0;padding:10px;background:var(--_panel);border-radius:8px;white-space:pre-wrap;overflow-wrap:anywhere;
max-height:230px;overflow-y:auto;font:12.5px/1.45 ui-monospace,monospace}
code.flag{white-space:nowrap;font-size:13px}.caches{display:grid;gap:0 32px;
grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr))}
.warn{border-left:3px solid var(--_mark);padding-left:10px}
tbody th,thead th:first-child{position:sticky;left:0;background:var(--_paper)}
@media (max-width:600px){body{font-size:14px}th,td{padding-right:10px}thead th,tbody th{min-width:84px}
code.flag{font-size:11px}}
"""


def main(config: ReportConfig) -> int:
    """Write the page.

    Raises:
        UsageError: a folder is not a run, there is no matplotlib, the file is there, or the page would be too large.
        RunError: the page cannot be written.
    """
    refuse_existing(config.out, config.overwrite)
    groups = grouped(read_runs(config.runs))
    figures = drawing("report")
    text = page(groups, config.title, figures)
    if len(text.encode()) > MOST_BYTES:
        raise UsageError(f"a page about {len(config.runs)} runs would have more than 2 MB; name fewer")
    publish_text(config.out, text, "report")
    table = {"page": str(config.out), "KiB": len(text.encode()) // 1024, "runs": sum(len(each.runs) for each in groups)}
    show("report", table, config.json)
    return 0


def page(groups: Sequence[Group], title: str, figures: Any) -> str:
    """The page about `groups`; `figures` draws."""
    runs = [run for group in groups for run in group.runs]
    caches = _caches(runs)
    facts = f"{len(runs)} run{'s' if len(runs) > 1 else ''}, written {time.strftime('%Y-%m-%d %H:%M')}"
    sections = {
        "What was run": _what(runs),
        "From which cache": f'<div class="caches">{"".join(caches.values()) or "<p>No run names a cache.</p>"}</div>',
        "What differs": _differs(groups),
        "Result": _numbers(groups, QUALITY) + _list(notes(list(groups))),
        "Curves": _curves(groups, figures),
        "Calibration": _numbers(groups, CALIBRATION) + _reliability(groups, figures) + _CALIBRATED,
        "Samples side by side": _samples(runs),
        "Cost": _numbers(groups, COST) + _COSTS,
        "Interventions and warnings": _interventions(runs),
        "What this page does not show": _limits(groups),
    }
    body = "".join(f"<section><h2>{name}</h2>{text}</section>" for name, text in sections.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        f'<link rel="icon" href="data:,"><title>{_safe(title)}</title><style>{_STYLE}</style></head><body><main>'
        f'<h1>{_safe(title)}</h1><p class="soft">{_safe(facts)}</p>{body}</main></body></html>\n'
    )


_CALIBRATED = (
    '<p class="soft">ECE is the mean distance between confidence and the share that is right, over 15 bins of '
    "confidence, at the last validation. On the dotted line of the diagram a student is right as often as it is sure; "
    "below it, it is too sure. Bins with less than a thousandth of the tokens are left out.</p>"
)
_COSTS = (
    '<p class="soft">Time is that of optimizer steps: without validation, checkpoints, compiling and pauses, and '
    "without the teacher, which ran once for the cache. Runs on busy or different machines do not compare.</p>"
)


def _safe(value: Any, most: int = 200) -> str:
    """Text of unknown origin for the page: cut, without control characters, escaped."""
    lines = str(value)[: most + 1].split("\n")
    text = "\n".join(map(printable, lines))
    return html.escape(text if len(str(value)) <= most else f"{text[:most]}…")


def _list(lines: Iterable[str]) -> str:
    found = [f"<li>{_safe(line, 400)}</li>" for line in lines]
    return f"<ul>{''.join(found)}</ul>" if found else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML; the first cell of a row is its heading."""
    top = "".join(f"<th>{each}</th>" for each in head)
    body = "".join(f"<tr><th>{row[0]}</th>{''.join(f'<td>{each}</td>' for each in row[1:])}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _what(runs: Sequence[Run]) -> str:
    def described(run: Run) -> Sequence[str]:
        environment, result = run.record.environment, run.record.result or {}
        libraries = environment.get("libraries")
        libraries = libraries if isinstance(libraries, dict) else {}
        versions = ", ".join(f"{name} {libraries.get(name)}" for name in ("kdtrain", "torch") if libraries.get(name))
        ranks = environment.get("ranks", 1)
        over = "1 rank" if ranks == 1 else f"{ranks} ranks"
        machine = f"{environment.get('mode', '-')} on {environment.get('device', '-')}, {over}"
        objective = result.get("objective") or ("cross-entropy" if run.options.get("alpha") == 0 else "distillation")
        cells = (run.student, objective, run.seed, machine, versions, run.status)
        return (_safe(run.name), *map(_safe, cells))

    return _table(("run", "student", "objective", "seed", "machine", "versions", "how it ended"), map(described, runs))


def _caches(runs: Sequence[Run]) -> dict[str, str]:
    """What is known of each cache, by digest."""
    found: dict[str, str] = {}
    for run in runs:
        if run.cache is not None and run.cache not in found:
            users = ", ".join(each.name for each in runs if each.cache == run.cache)
            path, mixed = run.options.get("cache"), run.record.environment.get("caches")
            named = " + ".join(map(str, path)) if isinstance(path, list) else path
            head = f"<h3>{_safe(named or 'text packed by the run')}</h3>"
            aligned = run.record.environment.get("alignment")
            digest = str(aligned.get("cache")) if isinstance(aligned, dict) else run.cache
            head += f"<p>digest {_safe(digest[:16])}, read by {_safe(users)}</p>"
            head += "<p>In the student's own tokens, beside the run.</p>" if isinstance(aligned, dict) else ""
            if isinstance(mixed, list):
                members = [each for each in mixed[:_MOST_CACHES] if isinstance(each, dict)]
                own = "".join(
                    f"<p>{_safe(each.get('name'))}: {_safe(each.get('share'))} of the draws</p>"
                    f"{_cache(Path(str(each.get('cache'))), str(each.get('digest')))}"
                    for each in members
                )
            else:
                own = _cache(Path(str(path)) if path else run.folder / "data", digest)
            found[run.cache] = f"<div>{head}{own}</div>"
    return found


def _cache(folder: Path, digest: str) -> str:
    try:
        manifest = kept_manifest(cache_folder(digest)) or read_manifest(folder)
    except (UsageError, RunError, OSError, ValueError) as error:
        reason = printable(str(error))[:200]
        return f'<p class="warn">It is no longer there to be described: {_safe(reason)}</p>'
    if not manifest.is_known_as(digest):
        return '<p class="warn">Another cache lies there now; this one is known by its digest alone.</p>'
    shown = [facts_table(cache_facts(manifest)), *fidelity(manifest)]
    return "".join(
        f"<p>{_safe(part)}</p>"
        if isinstance(part, str)
        else _table([*map(_safe, part.header)], ([_safe(each, 400) for each in row] for row in part.rows))
        for part in shown
    )


def _heads(groups: Sequence[Group]) -> list[str]:
    return ["", *(f'{_safe(group.name)}<br><span class="soft">{_safe(group.seeds)}</span>' for group in groups)]


def _differs(groups: Sequence[Group]) -> str:
    options = differing(groups)
    if not options:
        return (
            "<p>Nothing but the seed.</p>" if sum(len(each.runs) for each in groups) > 1 else "<p>There is one run.</p>"
        )
    rows = [
        [f'<code class="flag">{flag(name)}</code>', *(_safe(group.runs[0].shown(name)) for group in groups)]
        for name in options
    ]
    return _table(_heads(groups), rows)


def _numbers(groups: Sequence[Group], names: Iterable[str]) -> str:
    def shown(group: Group, name: str) -> str:
        own, off, beyond = cell(list(groups), group, name)
        step = (
            f'<small class="{"beyond" if beyond else ""}">{_safe(off)}{" *" if beyond else ""}</small>' if off else ""
        )
        return _safe(own) + step

    kept = [name for name in names if any(group.mean(name) for group in groups)]
    return _table(
        _heads(groups), ([_safe(MEASURES[name].label), *(shown(group, name) for group in groups)] for name in kept)
    )


def _curves(groups: Sequence[Group], figures: Any) -> str:
    records = [run.record for group in groups for run in group.runs]
    names = [name for name in CURVES if any(len(record.curve(name)) > 1 for record in records)]
    if not names:
        return "<p>There are no curves yet.</p>"
    own = [_svg(figures.draw_panel(groups, "tokens", name), figures, name) for name in names]
    panels = "".join(f"<figure>{svg}</figure>" for svg in own)
    legend = _svg(figures.draw_legend(groups), figures, "legend")
    return f'<figure class="legend">{legend}</figure><div class="curves">{panels}</div>'


def _reliability(groups: Sequence[Group], figures: Any) -> str:
    """The diagram, in the colours of the curves; nothing where no run has logged it."""
    made = figures.draw_reliability(groups)
    return "" if made is None else f'<figure class="legend">{_svg(made, figures, "reliability")}</figure>'


def _svg(figure: Any, figures: Any, name: str) -> str:
    """A figure as inline SVG in the colours of the page."""
    file = io.BytesIO()
    figures.save(figure, file, kind="svg", salt=name, text=True, transparent=True)
    text = file.getvalue().decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(
        r'<svg [^>]*viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{_safe(name)}">', text
    )
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    return re.sub(r"(?<=[: ])#[0-9a-f]{6}", lambda found: f"var({_COLOURS.get(found[0], '--_ink')})", text)


def _samples(runs: Sequence[Run]) -> str:
    texts: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for run in runs:
        try:
            rows = samples(run.folder)
        except (OSError, ValueError):
            continue
        for row in rows:
            prompts = texts.setdefault(str(row.get("prompt"))[:_TEXT], [])
            prompts.append((run.name, row))
    # prompts that more runs have come first: they compare
    chosen = sorted(texts.items(), key=lambda pair: -len(pair[1]))[:_PROMPTS]
    parts = []
    for prompt, found in chosen:
        own = "".join(
            f'<div><b>{_safe(name)}</b> <span class="soft">step {row["step"]:,}</span>'
            + "".join(
                f'<div class="soft">{kind}</div><pre>{_safe(row[kind], _TEXT)}</pre>'
                for kind in ("greedy", "sampled")
                if isinstance(row.get(kind), str)
            )
            + "</div>"
            for name, row in found[:_SAMPLED]
        )
        parts.append(f'<h3>Prompt</h3><pre>{_safe(prompt, _TEXT)}</pre><div class="texts">{own}</div>')
    return "".join(parts) or "<p>The runs sampled no text (--sample-freq).</p>"


def _interventions(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        found = run.interventions
        for each in found[:_EVENTS]:
            message = each.details.get("message") or ", ".join(
                f"{name} {value}" for name, value in list(each.details.items())[:6] if name != "time"
            )
            rows.append(
                (_safe(run.name), f"{each.step:,}", _safe(each.event, 40), _safe(each.level, 20), _safe(message, 300))
            )
        if len(found) > _EVENTS:
            kinds = ", ".join(
                f"{number} {kind}" for kind, number in Counter(each.event for each in found).most_common(6)
            )
            rows.append((_safe(run.name), "", "in all", "", _safe(kinds)))
    if not rows:
        return "<p>None: no run was resumed, rolled back, switched or warned.</p>"
    return _table(("run", "step", "event", "level", "what"), rows)


def _limits(groups: Sequence[Group]) -> str:
    """What no number above says."""
    runs = [run for group in groups for run in group.runs]
    seeds = max(len({str(run.seed) for run in group.runs}) for group in groups)
    lines = [
        "Losses are on the validation split by which the runs chose their best checkpoint, not on a test split.",
        "Nothing here is a downstream task: no answers, no code that runs and no long text were judged.",
        "The training loss of distillation weighs divergence and cross-entropy; compare the validation loss.",
    ]
    if seeds < 2:
        lines.append(
            "Every setup has one seed; no difference on this page is known to be larger than the luck of a seed."
        )
    if len({run.cache for run in runs}) > 1:
        lines.append("The runs read different caches; if their validation text differs, their losses do not compare.")
    if any(run.numbers["rollbacks"] for run in runs):
        lines.append("Steps that a rollback took back are not in the curves, nor in tokens and time.")
    if any(run.numbers["quantized_share"] for run in runs) and any(
        "cpu" in str(run.record.environment.get("device")) for run in runs
    ):
        lines.append("Quantised steps on a CPU are emulated: the loss is that of the format, the speed is not.")
    return _list(lines)
