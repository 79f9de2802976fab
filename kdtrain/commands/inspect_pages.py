"""What `kdtrain inspect` shows to people: a page of a run, a shard, a model folder, or a folder of these.

A page is lines and tables without frames; `--json` has the whole of what is known instead. All of it may come from
strangers: `kdtrain.tables` escapes it, and a number that is none is a `-`.
"""

import json
import math
import shlex
import struct
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import Manifest, Sidecar
from kdtrain.files import open_regular, parse_json, read_json, typed
from kdtrain.models.spec import ADAPTER_CONFIG
from kdtrain.monitor.health import Signs, findings, stalled
from kdtrain.monitor.progress import formula
from kdtrain.monitor.record import RunRecord
from kdtrain.run.path_kind import is_training
from kdtrain.run.result import RESULT
from kdtrain.tables import columns, duration, number, percent, short, size

Part = str | Table
TAIL = 2**22
"""Bytes of a log that a page reads, from its end: some ten thousand steps."""
_MOST_CACHES = 50
"""Most caches of a mixture that a page lists."""
_MESSAGE = 1000
"""Most characters of a warning on a page."""
_HEADER = 2**24
"""Most bytes of the header of a safetensors file that are read."""


def run_page(path: Path, facts: Mapping[str, Any], record: RunRecord) -> Iterator[Part]:
    """A run: how it ended, its losses beside the teacher's, checkpoints, warnings, health, and what to do next.

    facts: as `--json` prints them.
    """
    options = _table(record.options.get("run"))
    result, environment = record.result or {}, record.environment
    student = _table(environment.get("student"))
    name = student.get("name") or result.get("student_name") or options.get("student")
    parameters = f", {short(count)} parameters" if isinstance(count := student.get("parameters"), int) else ""
    named = next((options[each] for each in ("cache", "data") if options.get(each)), "")
    source = f" from {' and '.join(map(str, named)) if isinstance(named, list) else named}" if named else ""
    teacher = f" with teacher {options['teacher']}" if options.get("teacher") else ""
    if isinstance(count := student.get("trained_parameters"), int):
        held = f", beside {kind} weights" if (kind := student.get("base_weights")) else ""
        parameters += f" ({short(count)} trained: {student.get('trained')}{held})"
    yield f"{path}: {name}{parameters}{source}{teacher}, {environment.get('mode')} on {environment.get('device')}"
    state, ended = _state(path, record)
    yield ended
    yield ""
    yield from _losses(result, record)
    yield from _members(environment, record)
    checkpoints = _table(facts.get("checkpoints"))
    if checkpoints:
        links = {link: facts.get(link) for link in ("best", "latest")}
        yield columns(
            ("checkpoint", "train", "val", "written", "size", ""),
            [_checkpoint(name, _table(row), links) for name, row in checkpoints.items()],
            left=("checkpoint", ""),
        )
        damaged = sum(_table(row).get("verdict") != "ok" for row in checkpoints.values())
        sound = "all whole" if not damaged else f"{damaged} damaged: kdtrain verify {quoted(path)}"
        one = "checkpoint" if len(checkpoints) == 1 else "checkpoints"
        yield f"{len(checkpoints)} {one}, {size(facts.get('checkpoints in all (MiB)'))}, {sound}"
        yield f"train: {_objective(record)} of one step; val: cross-entropy of other text. Compare val alone."
    else:
        yield "no checkpoint"
    yield from aside(facts)
    warnings = Counter(each.event for each in record.events if each.level != "info")
    if warnings:
        last = {each.event: each for each in record.events if each.level != "info"}
        yield ""
        yield columns(
            ("warning", "times", "the last one"),
            [
                (kind, times, f"@{last[kind].step}: {_cut(last[kind].details.get('message', ''))}")
                for kind, times in warnings.most_common()
            ],
            left=("warning", "the last one"),
        )
    if state == "training":
        yield from health_lines(path, record)
    yield ""
    yield _next(path, state, facts, result)


def _cut(text: Any) -> str:
    """A message of one line, as long as kdtrain's are; a longer one ends between words."""
    return textwrap.shorten(str(text)[: 2 * _MESSAGE], _MESSAGE, placeholder=" ...")


def closing_page(path: Path, result: Mapping[str, Any]) -> Iterator[Part]:
    """What `distill` says at its end: how the run ended, its losses, where things are, and what to do next.

    result: of result.json, which has the rest; without `step` no step was taken.
    """
    state, ended = _ended(result)
    if result.get("step") is None:
        yield f"{path}: stopped by {result.get('stopped_by')} while not training"
    else:
        record = RunRecord.read(path, TAIL)
        yield f"{path}: {ended}"
        yield ""
        yield from _losses(result, record)
        if numbers := _last_numbers(result, record):
            yield numbers
        if warnings := result.get("warnings"):
            kinds = ", ".join(f"{times} {kind}" for kind, times in warnings.items())
            yield f"warnings: {kinds} (kdtrain inspect {quoted(path)} shows them)"
        if result.get("student"):
            yield f"student in {result['student']}, all numbers in {path / RESULT}"
    began = (path / "config.toml").exists()
    yield _next(path, state, {"exported": result.get("student")}, result) if began else "Next: the same command"


def _last_numbers(result: Mapping[str, Any], record: RunRecord) -> str:
    """The other numbers of the last validation, and the peak of memory, in a line; empty without any."""
    last = record.validations[-1] if record.validations else {}
    kl, told = last.get("validation/kl", math.nan), result.get("temperature")
    estimate = " (an estimate from samples)" if kl < 0 else ""
    parts = [f"KL to the teacher {_three(kl)}{estimate}"] if math.isfinite(kl) else []
    if (bits := last.get("validation/bits_per_byte")) is not None and math.isfinite(bits):
        teacher = last.get("validation/teacher_bits_per_byte")
        parts.append(f"{_three(bits)} bits per byte" + ("" if teacher is None else f" (teacher {_three(teacher)})"))
    for name, share in (("next token right", last.get("validation/accuracy")), ("ECE", last.get("validation/ece"))):
        parts += [f"{name} {100 * share:.1f} %"] if share is not None and math.isfinite(share) else []
    parts += [f"T {_three(told)}"] if told not in (None, 1.0) else []
    peak = result.get("peak_memory_mb")
    return ", ".join([*parts, f"peak memory {size(peak)}"] if peak else parts)


def health_lines(path: Path, record: RunRecord) -> Iterator[str]:
    """What is wrong with a run that trains, a line each, or that nothing is."""
    found = findings(Signs.of(path, record, time.time()))
    yield from (f"health: {kind}: {text}" for kind, text in found.items())
    if not found:
        yield "health: good"


def watch_line(path: Path, record: RunRecord) -> tuple[str, bool]:
    """One line on how a run is doing, and whether it trains."""
    state, ended = _state(path, record)
    last = record.steps[-1] if record.steps else {}
    parts = [ended]
    if "loss_avg" in last:
        parts.append(f"loss {number(last['loss_avg'])}")
    if record.validations:
        found = record.validations[-1]
        parts.append(f"val @{number(found['step'])} {number(found['validation/loss'])}")
    return " | ".join(parts), state in ("training", "silent", "unknown")


def _is_fresh(path: Path, record: RunRecord) -> bool:
    """Whether the run wrote so lately that another machine, or a container beside this one, may be training it."""
    signs = Signs.of(path, record, time.time())
    return signs.idle is not None and stalled(signs) is None


def _state(path: Path, record: RunRecord) -> tuple[str, str]:
    """In a word (training, done, failed, stopped, killed, silent, unknown) and as a line.

    silent: killed, or training on another machine or in another container.
    """
    result = record.result or {}
    steps = _table(record.options.get("optimizer")).get("steps") or record.environment.get("steps")
    training = is_training(path)
    done = int(record.metrics[-1]["step"]) if record.metrics else 0
    if training or (training is None and not result):
        last = record.steps[-1] if record.steps else {}
        rate, left = last.get("tok/s"), last.get("eta_h")
        parts = [f"training: step {done:,} of {number(record.environment.get('steps') or steps)}"]
        parts += [f"{short(rate)} tok/s"] if isinstance(rate, int | float) and math.isfinite(rate) else []
        parts += [f"{duration(left * 3600)} left"] if isinstance(left, int | float) and math.isfinite(left) else []
        return ("training" if training else "unknown"), ", ".join(parts)
    if not result:
        planned = number(record.environment.get("steps") or steps)
        line = f"killed at step {done:,} of {planned}: no process trains it, and it has no {RESULT}"
        if _is_fresh(path, record):
            return "silent", line.replace("no process", "unless another machine does: no process here")
        return "killed", line
    return _ended(result)


def _ended(result: Mapping[str, Any]) -> tuple[str, str]:
    """`_state` of a run that has a result."""
    reason = str(result.get("stop_reason"))
    where = f"at step {number(result.get('step'))} of {number(result.get('steps'))}"
    cost = [f"{duration(seconds)} of training"] if isinstance(seconds := result.get("seconds"), int | float) else []
    cost += [f"{short(tokens)} tokens"] if isinstance(tokens := result.get("tokens"), int) else []
    cost += [f"{short(rate)} tok/s"] if isinstance(rate := result.get("tokens_per_second"), int | float) else []
    line = f"{'stopped by ' + str(result.get('stopped_by')) if reason == 'signal' else reason} {where}"
    if result.get("error") is not None:
        return "failed", f"failed ({reason}) {where}: {str(result['error'])[:500]}"
    return ("stopped" if reason == "signal" else "done"), ", ".join([line, *cost])


def _losses(result: Mapping[str, Any], record: RunRecord) -> Iterator[Part]:
    """The validation losses beside those of the teacher and of plain cross-entropy."""
    found = [(int(each["step"]), each.get("validation/loss")) for each in record.validations]
    header, row = ["validation loss", "start", "best", "last"], ["nats a token"]
    if not found and "first_validation_loss" not in result:
        return
    finite = [(step, loss) for step, loss in found if isinstance(loss, int | float) and math.isfinite(loss)]
    best_step, best = min(finite, key=lambda each: each[1], default=(None, None))
    row += [_three(result.get("first_validation_loss", finite[0][1] if finite else None))]
    row += [_at(result.get("best_validation_loss", best), result.get("best_step", best_step))]
    row += [_at(finite[-1][1], finite[-1][0]) if finite else number(result.get("last_validation_loss"))]
    teacher = result.get("teacher_validation_loss")
    if teacher is None and record.validations:
        teacher = record.validations[-1].get("validation/teacher_loss")
    others = {"merged": "merged_validation_loss", "cross-entropy": "cross_entropy_validation_loss"}
    for name, value in (("teacher", teacher), *((name, result.get(key)) for name, key in others.items())):
        if isinstance(value, int | float) and math.isfinite(value):
            header.append(name)
            row.append(_three(value))
    yield columns(header, [row], left=("validation loss",))
    if result.get("cross_entropy_run"):
        yield f"cross-entropy: {result['cross_entropy_run']}, the same student, cache and tokens without a teacher"
    yield ""


def _at(loss: Any, step: Any) -> str:
    return _three(loss) + (f" @{step:,}" if isinstance(step, int) else "")


def _three(loss: Any) -> str:
    """A loss with three digits, aligned with the others."""
    return f"{loss:.3f}" if isinstance(loss, int | float) and abs(loss) < 1e6 else number(loss)


def _checkpoint(name: str, row: Mapping[str, Any], links: Mapping[str, Any]) -> tuple[str, ...]:
    notes = [link for link, target in links.items() if target == name]
    notes += [verdict] if (verdict := str(row.get("verdict"))) != "ok" else []
    written = str(row.get("written") or "-")[:16]
    losses = (_three(row.get(each)) for each in ("loss", "validation_loss"))
    return name, *losses, written, size(row.get("MiB")), ", ".join(notes)


def _members(environment: Mapping[str, Any], record: RunRecord) -> Iterator[Part]:
    """The caches that a run mixes: what it draws of each, and the last validation by each."""
    caches = environment.get("caches")
    last = record.validations[-1] if record.validations else {}
    if isinstance(caches, list) and caches:
        rows = [
            (
                str(_table(each).get("name") or "-")[:60],
                percent(_table(each).get("share")),
                *(str(_table(each).get(key) or "-")[:60] for key in ("sequences", "teacher")),
                *(_three(last.get(f"validation/{_table(each).get('name')}/{key}")) for key in ("loss", "teacher_loss")),
            )
            for each in caches[:_MOST_CACHES]
        ]
        heads = ("cache", "share of the draws", "sequences", "taught by", "val", "teacher's val")
        yield columns(heads, rows, left=("cache", "taught by"))
        yield ""


def _objective(record: RunRecord) -> str:
    options = _table(record.options.get("objective"))
    alpha, terms = options.get("alpha"), _table(record.environment.get("alignment")).get("terms")
    divergence = "+".join(map(str, terms[:2])) if isinstance(terms, list) else options.get("divergence")
    distils = any(_table(record.options.get("run")).get(each) for each in ("cache", "teacher"))
    weight = float(alpha) if distils and isinstance(alpha, int | float) else 0.0
    own = options.get("hidden_weight", 1.0)
    hidden = float(own) if options.get("hidden_loss") not in (None, "none") and isinstance(own, int | float) else None
    caches = record.environment.get("caches")
    kinds = {_table(each).get("targets") == "none" for each in caches} if isinstance(caches, list) else set()
    routed = _table(record.environment.get("student")).get("router_weight")
    router = routed if isinstance(routed, int | float) else 0.0
    return formula(weight, str(divergence), hidden, bool(weight) and len(kinds) > 1, router)


def aside(facts: Mapping[str, Any]) -> Iterator[Part]:
    """What repairs and earlier attempts have moved aside, if anything."""
    for name, found in facts.items():
        if name.startswith("set aside") and isinstance(found, Mapping):
            yield ""
            yield f"set aside, {size(found.get('in all'))}; remove what you no longer need:"
            rows = [(f"  {each}", size(mib)) for each, mib in found.items() if each != "in all"]
            yield columns(("  path", "size"), rows, left=("  path",))


def _next(path: Path, state: str, facts: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    word = quoted(path)
    if state in ("training", "silent", "unknown"):
        return f"Next: kdtrain inspect {word} --watch"
    if state in ("stopped", "killed", "failed"):
        first = "Mend what failed. " if state == "failed" else ""
        return f"{first}Next: kdtrain distill --config {quoted(path / 'config.toml')}"
    if facts.get("exported"):
        chat = (path / "student" / "chat_template.jinja").exists()
        return f'Next: kdtrain generate {word} "{"Say hello." if chat else "def main("}"'
    return f"Next: kdtrain export {word} --out {quoted(path.with_name(path.name + '-student'))}"


def quoted(path: Path | str) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


def local_page(facts: Mapping[str, Any]) -> Iterator[Part]:
    """What is kept of caches from elsewhere: `facts` as `--json` prints them."""
    count = len(facts["caches"])
    yield f"{facts['folder']}: {size(facts['bytes'] / 2**20)} of {count} cache{'s' * (count != 1)} from elsewhere"
    for each in facts["caches"]:
        stamp = each["last read"]
        read = "no shard read yet" if stamp is None else time.strftime("last read %F %H:%M", time.localtime(stamp))
        yield ""
        here = f"{each['shards here']} of {each['shards']} shards, {size(each['bytes'] / 2**20)}"
        yield f"{each['digest'][:12]}  {here}, {read}"
        yield from (f"  from {where}" for where in each["from"])
        yield f"  teacher {each['teacher'] or '-'}"
        yield f"  in {Path(each['folder']).relative_to(facts['folder'])}"
    yield ""
    yield "Above --local-limit the shard that was read longest ago goes first."
    yield "A folder of a cache may be removed."


def shard_facts(path: Path, sidecar: Sidecar) -> dict[str, Any]:
    """A shard, from the record beside it."""
    first, count = sidecar["first_sequence"], sidecar["sequences"]
    return {
        "split": sidecar["split"],
        "sequences": f"{count:,}: {first:,} to {first + count - 1:,}",
        "size": size(sidecar["bytes"] / 2**20),
        "stored (MiB)": {name: value / 2**20 for name, value in sidecar["stored"].items()},
        "broken": sidecar["broken"],
        "sha256": sidecar["sha256"],
        "cache": str(path.parents[1]),
    }


def model_facts(path: Path) -> dict[str, Any]:
    """A model folder, such as an export: its architecture, size and tokenizer. ValueError, OSError: it is none."""
    adapter = (path / ADAPTER_CONFIG).is_file()
    config = read_json(path / (ADAPTER_CONFIG if adapter else "config.json"), dict[str, Any])
    shapes: dict[str, list[int]] = {}
    dtypes: Counter[str] = Counter()
    total = 0
    for file in sorted(path.glob("*.safetensors")):
        total += file.stat().st_size
        for name, each in _header(file).items():
            if name != "__metadata__":
                shape = typed(typed(each, dict[str, Any]).get("shape"), list[int])
                shapes[name] = shape
                dtypes[str(each.get("dtype"))] += math.prod(shape)
    names: tuple[str, ...] = ("base_model_name_or_path", "r", "lora_alpha")
    if not adapter:
        names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
    facts: dict[str, Any] = {name: config[name] for name in names if isinstance(config.get(name), int | str)}
    facts |= {"parameters": sum(map(math.prod, shapes.values())), "number formats": dict(dtypes)}
    facts |= {"weights": size(total / 2**20), "tokenizer": (path / "tokenizer.json").exists()}
    with suppress(OSError, ValueError):
        origin = read_json(path / "kdtrain.json", dict[str, Any])
        shown = ("cache", "step", "caches", "pruned")
        facts["exported by kdtrain"] = {name: origin[name] for name in shown if name in origin}
    return facts


def _header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: dtype and shape by name."""
    with open_regular(path) as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if length > _HEADER:
            raise ValueError(f"{path}: its header has {length:,} bytes")
        try:
            return typed(parse_json(file.read(length).decode()), dict[str, Any])
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from None


def folder_facts(runs: list[Path], caches: list[tuple[Path, Manifest]]) -> dict[str, Any]:
    """The runs and caches of a folder, each with its main numbers."""
    found: dict[str, Any] = {"runs": {}, "caches": {}}
    for path in runs:
        row: dict[str, Any]
        try:
            record = RunRecord.read(path, TAIL)
        except (OSError, ValueError) as error:
            row = {"state": f"cannot be read: {error}"}
        else:
            result, options = record.result or {}, _table(record.options.get("run"))
            found_losses = [each["validation/loss"] for each in record.validations]
            losses = [each for each in found_losses if isinstance(each, float) and math.isfinite(each)]
            last = int(record.metrics[-1]["step"]) if record.metrics else 0
            row = {
                "state": _state(path, record)[0],
                "student": _table(record.environment.get("student")).get("name"),
                "cache": options.get("cache"),
                "step": result.get("step", last),
                "steps": record.environment.get("steps") or result.get("steps"),
                "best_validation_loss": result.get("best_validation_loss", min(losses, default=None)),
                "teacher_validation_loss": result.get("teacher_validation_loss"),
                "seconds": result.get("seconds"),
                "warnings": sum(each.level != "info" for each in record.events),
            }
        found["runs"][path.name] = row
    for path, manifest in caches:
        settings = manifest.settings
        found["caches"][path.name] = {
            "teacher": (settings.teacher or {}).get("spec"),
            "kind": settings.codec.kind,
            "top_k": settings.codec.top_k,
            "num_samples": settings.codec.num_samples,
            "tokens": sum(each["sequences"] for each in manifest.splits.values()) * settings.seq_len,
            "bytes per token": dict(manifest.bytes_per_token or {}).get("total"),
        }
    return found


def folder_page(path: Path, facts: Mapping[str, Any]) -> Iterator[Part]:
    """A folder of runs and caches, a row each."""
    if facts["runs"]:
        header = ("run", "student", "cache", "state", "step", "val", "teacher", "time", "warn")
        rows = []
        for name, row in facts["runs"].items():
            step = f"{number(row.get('step'))}/{number(row.get('steps'))}"
            losses = (_three(row.get(each)) for each in ("best_validation_loss", "teacher_validation_loss"))
            named = row.get("cache") or "-"
            cache = " + ".join(Path(str(each)).name for each in (named if isinstance(named, list) else [named]))
            who = str(row.get("student") or "-"), cache, str(row.get("state"))
            rows.append((name, *who, step, *losses, duration(row.get("seconds")), number(row.get("warnings"))))
        yield columns(header, rows, left=("run", "student", "cache", "state"))
    if facts["caches"]:
        yield "" if facts["runs"] else f"{path}:"
        titles = ("cache", "teacher", "kept", "tokens", "bytes a token")
        kept = [
            (name, str(row["teacher"] or "-"), _kept(row), short(row["tokens"]), number(row["bytes per token"]))
            for name, row in facts["caches"].items()
        ]
        yield columns(titles, kept, left=("cache", "teacher", "kept"))


def _kept(row: Mapping[str, Any]) -> str:
    parts = [f"top {row['top_k']}"] * bool(row["top_k"]) + [f"{row['num_samples']} samples"] * bool(row["num_samples"])
    return " + ".join(parts) or row["kind"]


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def folder_of(path: Path) -> dict[str, list[Path]]:
    """The runs and the caches directly in a folder, by name."""
    inside = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    runs = [each for each in inside if (each / "config.toml").is_file() and (each / "environment.json").is_file()]
    return {"runs": runs, "caches": [each for each in inside if (each / cache_format.MANIFEST).is_file()]}
