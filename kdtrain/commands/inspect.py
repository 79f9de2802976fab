"""`kdtrain inspect`: shows a run, a cache, or what is in them as a page, or the capabilities of this machine.

A page is lines and tables without frames; `--json` has the whole of what is known instead. All of it may come from
strangers: `kdtrain.tables` escapes it, and a number that is none is a `-`.
"""

import contextlib
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import Manifest, check_sizes, read_manifest, read_sidecar
from kdtrain.cache.tools.facts import cache_facts, contents, fidelity, heading, next_step, parent_lines, tail_rule
from kdtrain.cache.tools.unfinished import progress
from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.sealed import STATE, checkpoint_at, problem, read_checkpoint, read_state
from kdtrain.checkpoint.store import Store
from kdtrain.config.commands import InspectConfig
from kdtrain.config.values import refuse
from kdtrain.errors import RunError, UsageError
from kdtrain.files import aside_in, open_regular, read_json, typed
from kdtrain.models.spec import ADAPTER_CONFIG, ModelSpec, shipped
from kdtrain.monitor import facts as of_run
from kdtrain.monitor.facts import TAIL, damage_of, evaluations, kind_of, quoted, read_result, tested
from kdtrain.monitor.progress import setup_logging
from kdtrain.monitor.record import RunRecord, as_table
from kdtrain.net.address import Address, parse_address
from kdtrain.outputs import mib
from kdtrain.tables import Part, Table, duration, facts_table, loss_text, number, short, show_page, size

_PARENTS = 50
"""Most parents of a cache that a page lists."""


def main(config: InspectConfig) -> int:
    """Print the page of the path, or of this machine.

    Raises:
        UsageError: the path is not of a kind that is shown, or is a damaged cache.
    """
    setup_logging()
    if config.hardware:
        config.show("hardware", hardware())
        return 0
    assert config.path is not None
    address = parse_address(config.path)
    path = config.path
    kind = "cache elsewhere" if address else _kind(config.path)
    refuse(config.watch and kind not in ("run", "cache"), f"--watch is for runs and caches; {path} is a {kind}")
    if config.watch:
        return _watch(path, kind)
    with _as_written(path):
        facts, page = _PAGES[kind](path) if address is None else _remote(address)
        config.show(f"{kind} {path}" if page is None else page, facts)
    return 0


def _kind(path: Path) -> str:
    """Return the kind of thing that lies at a path. UsageError: kdtrain does not know it."""
    if path.name.endswith(".h5") and path.is_file() and cache_format.SHARD_NAME.fullmatch(path.stem):
        return "shard"
    if path.suffix == ".toml" and path.is_file():
        return "spec"
    if not path.exists() and str(path) in {**shipped("students"), **shipped("teachers")}:
        return "spec"
    is_folder = path.is_dir() and not (path / cache_format.MANIFEST).exists() and any(_folders(path).values())
    try:
        kind = kind_of(path)
        return "folder" if is_folder and kind == "cache" else kind
    except UsageError:
        if is_folder:
            return "folder"
        if any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
            return "model"
        raise


@contextlib.contextmanager
def _as_written(path: Path) -> Iterator[None]:
    """Turn an error about a file that a stranger wrote into a UsageError."""
    try:
        yield
    except (UsageError, RunError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"{path} is not what kdtrain writes ({error!r}); see whether --json shows it") from None


def _watch(path: Path, kind: str) -> int:
    """Print the state of a run or a cache every ten seconds until it ends."""
    before: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            with _as_written(path):
                if kind == "run":
                    record = RunRecord.read(path, TAIL)
                    state, line = of_run.state_of(path, record)
                    line = of_run.watch_line(record, line)
                    active = state in of_run.ACTIVE
                    lines = [*(of_run.health_lines(path, record) if active else ())]
                elif found := progress(path):
                    line = found["progress"]
                    active = found["making"] is not False
                    lines = []
                else:
                    line = f"finished: {heading(read_manifest(path).settings)}"
                    active = False
                    lines = []
            show_page([line, *(each for each in lines if each not in before)])
            before = lines
            if not active:
                break
            time.sleep(10.0)
    return 0


def hardware() -> dict[str, Any]:
    """Return the devices, number formats and compilers of this machine, with the reason where one is missing."""
    import torch

    from kdtrain.precision.backends import capabilities
    from kdtrain.precision.modes import has_bf16, why_not_compile

    cpu = torch.device("cpu")
    compile_reason = why_not_compile(cpu)
    table: dict[str, Any] = {
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "cpu bf16": "yes" if has_bf16(cpu) else "no: neither AVX512-BF16 nor AMX; bf16 would be emulated and slow",
        "torch.compile": "yes" if compile_reason is None else f"no: {compile_reason}",
        "torch": torch.__version__,
    }
    best = torch.device("cuda") if torch.cuda.is_available() else cpu
    table |= {f"{each.mode} by {each.backend}": str(each) for each in capabilities(best)}
    if not torch.cuda.is_available():
        return {**table, "cuda": "no: torch finds no CUDA device"}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        bf16 = "bf16" if has_bf16(device) else "no bf16"
        table[f"cuda:{index}"] = f"{properties.name}, {size(properties.total_memory / 2**20)}, {bf16}"
    return table


_Found = tuple[dict[str, Any], Iterator[Part] | None]
"""What `--json` prints, and the page; None: a table of the same."""


def _cache(path: Path) -> _Found:
    if found := progress(path):
        watch = f"kdtrain inspect {quoted(path)} --watch"
        follows = "the command that began it, again" if found["making"] is False else watch
        return found, iter([f"{path}: {found['state']}", found["progress"], "", f"Next: {follows}"])
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    record = _cache_record(path, manifest)
    return record, _cache_page(path, record, manifest)


def _remote(address: Address) -> _Found:
    """Describe a remote cache from its manifest, the only file that is fetched."""
    from kdtrain.cache.read.remote import open_remote  # with the reader's torch

    remote = open_remote(address)
    record = {"from": str(remote.address)} | _cache_record(remote.folder, remote.manifest)
    missing = {split: len(remote.missing(split)) for split in remote.manifest.splits}
    return record | {"shards not here": missing}, _cache_page(str(address), record, remote.manifest)


def _cache_record(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the facts that `--json` prints of a cache."""
    settings = manifest.settings
    optional = ("weights_cost", "generated", "text_counts", "origin", "parents")
    return {
        "digest": manifest.digest,
        "teacher": settings.teacher,
        "data": settings.data,
        "codec": {name: value for name, value in settings.codec.to_json().items() if value not in (0, [], ())},
        "tail rule": tail_rule(manifest),
        "vocabulary": settings.vocab_size,
        "tokenizer": f"{settings.tokenizer_size:,} entries, digest {(settings.tokenizer_digest or '-')[:12]}",
        "seq_len": settings.seq_len,
        "document_mask": settings.document_mask,
        "sequences": {name: split["sequences"] for name, split in manifest.splits.items()},
        "tokens": {name: split["sequences"] * settings.seq_len for name, split in manifest.splits.items()},
        "shards": {name: len(split["shards"]) for name, split in manifest.splits.items()},
        "bytes per token": manifest.bytes_per_token,
        "temperature range": manifest.temperature_range,
        "fidelity": manifest.fidelity,
        **{name: value for name in optional if (value := getattr(manifest, name))},
        "versions": manifest.versions,
        **_aside(path.resolve()),
    }


def _cache_page(path: Path | str, record: Mapping[str, Any], manifest: Manifest) -> Iterator[Part]:
    yield f"{path}: {heading(manifest.settings)}"
    yield from ("", facts_table(cache_facts(manifest)))
    if found := fidelity(manifest):
        yield from ("", *found)
    if manifest.parents:
        yield from ("", "made of", *(f"  {line}" for line in parent_lines(manifest, _PARENTS)))
    yield from _aside_lines(record)
    yield from ("", *next_step(path, manifest))


def _run(path: Path) -> _Found:
    record = _run_record(path)

    def page() -> Iterator[Part]:  # --json needs none of the logs, which may be unreadable
        yield from _run_page(path, record, RunRecord.read(path, TAIL))

    return record, page()


def _run_page(path: Path, known: Mapping[str, Any], record: RunRecord) -> Iterator[Part]:
    """Yield the page of a run: its end, its losses beside the teacher's, checkpoints, warnings, health, the next step.

    known: as `--json` prints it.
    """
    state, line = of_run.state_of(path, record)
    yield from (f"{path}: {of_run.heading(record)}", line, "")
    yield from of_run.losses(record.result or {}, record)
    yield from of_run.members(record)
    if numbers := of_run.last_numbers(record.result or {}, record):
        yield from (numbers, "")
    if checkpoints := {name: as_table(row) for name, row in as_table(known.get("checkpoints")).items()}:
        rows = []
        for name, row in checkpoints.items():
            notes = [link for link in ("best", "latest") if known.get(link) == name]
            notes += [verdict] if (verdict := str(row.get("verdict"))) != "ok" else []
            losses = (loss_text(row.get(each)) for each in ("loss", "validation_loss"))
            rows.append((name, *losses, str(row.get("written") or "-")[:16], size(row.get("MiB")), ", ".join(notes)))
        yield Table.of(("checkpoint", "train", "val", "written", "size", ""), rows, left=("checkpoint", ""))
        damaged = sum(row.get("verdict") != "ok" for row in checkpoints.values())
        sound = "all whole" if not damaged else f"{damaged} damaged: kdtrain verify {quoted(path)}"
        one = "checkpoint" if len(checkpoints) == 1 else "checkpoints"
        yield f"{len(checkpoints)} {one}, {size(known.get('checkpoints in all (MiB)'))}, {sound}"
        yield f"train: {of_run.objective(record)} of one step; val: cross-entropy of other text. Compare val alone."
    else:
        yield "no checkpoint"
    if tables := [*evaluations(record.evaluations)]:
        yield from ("", *tables)
    yield from _aside_lines(known)
    yield from of_run.warnings(record)
    if state == "training":
        yield from of_run.health_lines(path, record)
    yield from ("", of_run.next_step(path, state, known.get("exported")))


def _shard(path: Path) -> _Found:
    path = path.absolute()
    try:
        sidecar = read_sidecar(path.parents[1], path.stem)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: the record beside it cannot be read ({error}); run kdtrain verify") from None
    first, count = sidecar["first_sequence"], sidecar["sequences"]
    return {
        "split": sidecar["split"],
        "sequences": f"{count:,}: {first:,} to {first + count - 1:,}",
        "size": size(sidecar["bytes"] / 2**20),
        "stored (MiB)": {name: value / 2**20 for name, value in sidecar["stored"].items()},
        "broken": sidecar["broken"],
        "sha256": sidecar["sha256"],
        "cache": str(path.parents[1]),
    }, None


def _model(path: Path) -> _Found:
    """Describe a model folder, such as an export: its architecture, size and tokenizer."""
    adapter = (path / ADAPTER_CONFIG).is_file()
    shapes = dict[str, int]()
    dtypes = Counter[str]()
    total = 0
    try:
        config = read_json(path / (ADAPTER_CONFIG if adapter else "config.json"), dict[str, Any])
        for file in sorted(path.glob("*.safetensors")):
            open_regular(file).close()  # opening a pipe blocks
            total += file.stat().st_size
            with safe_open(file, "numpy") as tensors:  # of the file the header alone is read
                for name in tensors.keys():  # noqa: SIM118
                    part = tensors.get_slice(name)
                    shapes[name] = math.prod(part.get_shape())
                    dtypes[part.get_dtype()] += shapes[name]
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"{path} is not a model folder: {error}") from None
    names: tuple[str, ...] = ("base_model_name_or_path", "r", "lora_alpha")
    if not adapter:
        names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
    record: dict[str, Any] = {name: config[name] for name in names if isinstance(config.get(name), int | str)}
    record |= {"parameters": sum(shapes.values()), "number formats": dict(dtypes)}
    record |= {"weights": size(total / 2**20), "tokenizer": (path / "tokenizer.json").exists()}
    with contextlib.suppress(OSError, ValueError):
        origin = read_json(path / "kdtrain.json", dict[str, Any])
        shown = ("cache", "step", "caches", "pruned")
        record["exported by kdtrain"] = {name: origin[name] for name in shown if name in origin}
    return record, None


def _folders(path: Path) -> dict[str, dict[str, Path]]:
    """Return the runs and the caches in a folder, or in a sweep's folders, by name."""
    inside = sorted(each for each in path.glob("*/*" if (path / "sweep.json").is_file() else "*") if each.is_dir())
    named = {str(each.relative_to(path)): each for each in inside if not each.name.startswith(".")}
    run, files = ("config.toml", "environment.json"), (cache_format.MANIFEST, cache_format.SETTINGS)
    runs = {name: each for name, each in named.items() if all((each / file).is_file() for file in run)}
    return {"runs": runs, "caches": {k: each for k, each in named.items() if any((each / f).is_file() for f in files)}}


def _folder(path: Path) -> _Found:
    """Describe the runs and caches of a folder, each with its main numbers."""
    found = _folders(path)
    runs = dict[str, Any]()
    caches = dict[str, Any]()
    kept = dict[str, str]()
    for name, each in found["runs"].items():
        try:
            runs[name] = of_run.run_row(each, RunRecord.read(each, TAIL))
        except (OSError, ValueError) as error:
            runs[name] = {"state": f"cannot be read: {error}"}
    for name, each in found["caches"].items():
        try:
            if unfinished := progress(each):
                caches[name] = unfinished
                continue
            manifest = read_manifest(each)
            kept[name] = contents(manifest)
            caches[name] = {
                "teacher": (manifest.settings.teacher or {}).get("spec"),
                "kind": manifest.codec.kind,
                "top_k": manifest.codec.top_k,
                "num_samples": manifest.codec.num_samples,
                "tokens": sum(each["sequences"] for each in manifest.splits.values()) * manifest.settings.seq_len,
                "bytes per token": manifest.bytes_per_token["total"],
            }
        except (UsageError, RunError, ValueError) as error:
            caches[name] = {"state": f"cannot be read: {error}"}

    def page() -> Iterator[Part]:
        if runs:
            titles = ("run", "student", "cache", "state", "step", "val", "teacher", "test", "time", "warn")
            yield Table.of(titles, [_run_cells(name, row) for name, row in runs.items()], left=titles[:4])
            yield from tested([row["test"] for row in runs.values() if row.get("test")])
        if caches:
            yield "" if runs else f"{path}:"
            rows = [
                (name, str(row["teacher"] or "-"), kept[name], short(row["tokens"]), row["bytes per token"])
                for name, row in caches.items()
                if name in kept
            ]
            heads = ("cache", "teacher", "kept", "tokens", "bytes per token")
            if rows:
                yield Table.of(heads, rows, left=heads[:3])
            shown = ((name, [row[key] for key in ("state", "progress") if key in row]) for name, row in caches.items())
            yield from (f"{name}: {', '.join(parts)}" for name, parts in shown if parts)

    return {"runs": runs, "caches": caches}, page()


def _run_cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    named = row.get("cache") or "-"
    cache = " + ".join(Path(str(each)).name for each in (named if isinstance(named, list) else [named]))
    test = as_table(row.get("test"))
    names = ("best_validation_loss", "teacher_validation_loss")
    losses = map(loss_text, (*map(row.get, names), test.get("loss")))
    numbers = (f"{number(row.get('step'))}/{number(row.get('steps'))}", *losses, duration(row.get("seconds")))
    return name, str(row.get("student") or "-"), cache, str(row.get("state")), *numbers, number(row.get("warnings"))


def _run_record(path: Path) -> dict[str, Any]:
    """Return the facts that `--json` prints of a run."""
    store = Store(path / "checkpoints")
    environment = path / "environment.json"
    rows = {entry.name: _row(store, entry) for entry in store.entries(apart=True)}
    rows = {name: row for name, row in rows.items() if store.path(name).exists()}  # else pruned meanwhile
    result = read_result(path)
    caches: dict[str, Any] = {}
    try:
        described = read_json(environment, dict[str, Any])
        student = described["student"]
        caches = {"caches": described["caches"]} if "caches" in described else {}
    except (OSError, ValueError, KeyError):
        student = f"{environment.name} cannot be read"
    return {
        "student": student,
        **caches,
        "ended": None if result is None else {**result},
        "exported": str(path / "student") if (path / "student").is_dir() else None,
        **{link: target for link in tiers.LINKS if (target := store.linked(link)) is not None},
        "checkpoints": rows,
        "checkpoints in all (MiB)": mib([*map(store.path, rows)]),
        **_aside(path.resolve()),
    }


def _aside(path: Path) -> dict[str, Any]:
    """Return the files and folders set aside beside and inside a run or a cache: MiB by path, and in all."""
    folders = [path, path / "checkpoints", path / "shards"]
    aside = [each for each in aside_in(path.parent) if each.name.startswith(f"{path.name}.")]
    aside += [each for folder in folders for each in aside_in(folder)]
    if not aside:
        return {}
    table = {os.path.relpath(each, path): mib([each]) for each in aside}
    return {"set aside (MiB)": {**table, "in all": mib(aside)}}


def _aside_lines(record: Mapping[str, Any]) -> Iterator[Part]:
    if found := record.get("set aside (MiB)"):
        yield from ("", f"set aside, {size(found['in all'])}; remove what you no longer need:")
        rows = [(f"  {each}", size(mib)) for each, mib in found.items() if each != "in all"]
        yield Table.of(("  path", "size"), rows, left=("  path",))


def _row(store: Store, entry: tiers.CheckpointEntry) -> dict[str, Any]:
    """Return the row of a checkpoint: `loss` is the last training loss, `best_loss` the lowest validation loss so far.

    `validation_loss` is that of its own step, if it was validated; `written` is in local time.
    """
    path = store.path(entry.name)
    progress = dict[str, Any]()
    if (damage := problem(path)) is None:
        try:
            progress = typed(read_state(path).get("progress"), dict[str, Any])
        except (ValueError, OSError) as error:
            damage = f"{path}/{STATE} is not what a run writes: {error}"
    written = None
    with contextlib.suppress(OSError):
        written = datetime.fromtimestamp((path / cache_format.MANIFEST).stat().st_mtime).isoformat(" ", "seconds")
    return {
        "step": entry.step if entry.step >= 0 else None,
        "loss": progress.get("loss"),
        "validation_loss": progress.get("last_loss") if progress.get("validated_step") == entry.step else None,
        "best_loss": progress.get("best_loss"),
        "written": written,
        "tier": tiers.tier(entry.name),
        "MiB": mib([path]),
        "verdict": f"damaged: {damage}" if damage else "ok",
    }


def _loaded(path: Path) -> dict[str, Any]:
    from kdtrain.training.state import load_saved

    if (damage := damage_of(path)) is not None:
        return {"verdict": f"damaged: {damage}"}
    checkpoint = load_saved(path)
    numbers = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    return {
        "verdict": "ok",
        **checkpoint.state["progress"],
        "tensors": len(checkpoint.tensors),
        "numbers": numbers,
        "cache": checkpoint.state["cache"],
        "options": checkpoint.state["options"],
    }


def _spec(path: Path) -> _Found:
    """Describe the recipe of a teacher or a student."""
    teaches = str(path) in shipped("teachers") or path.parent.name == "teachers"
    word = quoted(path)
    spec = ModelSpec.read(str(path), "teachers" if teaches else "students")
    facts = {name: value for name, value in vars(spec).items() if value not in (None, (), {}, False)}
    if spec.lora is not None:
        facts["lora"] = {name: value for name, value in vars(spec.lora).items() if value not in (None, False)}
    begins = {"scratch": "fresh weights", "teacher-layers": f"layers {list(spec.layers)} of {spec.teacher}"}
    config = dict(spec.config or {})
    kind = f"a {config.pop('model_type')}, " if config else ""
    source = f" of {spec.source}" if spec.source else ""
    follows = f"distill --cache CACHE --student {word} --out runs/NAME"
    lines = [
        f"{word}: {spec.name}, {kind}{begins.get(spec.init, 'the weights')}{source}",
        ", ".join(f"{name} {value}" for name, value in config.items()),
        f"trains {spec.lora}" if spec.lora else "",
        f"tokenizer {spec.tokenizer}" if spec.tokenizer else "",
        f"{f'{spec.dtype}, ' if teaches else ''}attention {spec.attention}",
        f"Next: kdtrain {f'cache-teacher --teacher {word} --data SOURCE --out cache/NAME' if teaches else follows}",
    ]
    return facts, filter(None, lines)


_PAGES: dict[str, Callable[[Path], _Found]] = {
    "spec": _spec,
    "cache": _cache,
    "run": _run,
    "checkpoint": lambda path: (read_checkpoint(lambda: checkpoint_at(path), _loaded), None),
    "shard": _shard,
    "model": _model,
    "folder": _folder,
}
