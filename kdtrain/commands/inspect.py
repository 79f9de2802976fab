"""`kdtrain inspect`: shows a run, a cache, or what is in them as a page, or the capabilities of this machine."""

import contextlib
import math
import os
import platform
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from kdtrain.cache.address import Address, parse_address
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import Manifest, check_sizes, read_manifest, read_sidecar
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.local_store import home, listing
from kdtrain.cache.read.remote import open_remote
from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.sealed import STATE, checkpoint_at, problem, read_checkpoint, read_state
from kdtrain.checkpoint.store import Store
from kdtrain.commands import inspect_pages
from kdtrain.commands.cache_pages import cache_page
from kdtrain.config import InspectConfig
from kdtrain.config.choices import resolve_tail
from kdtrain.config.values import refuse
from kdtrain.errors import RunError, UsageError
from kdtrain.files import aside_in, read_json, typed
from kdtrain.models.spec import ADAPTER_CONFIG, ModelSpec, read_spec, shipped
from kdtrain.monitor.progress import setup_logging
from kdtrain.monitor.record import RunRecord
from kdtrain.run.path_kind import damage_of, kind_of
from kdtrain.run.result import read_result
from kdtrain.tables import show, show_page


class _Progress(TypedDict):
    """The numbers of a checkpoint that a run's page shows."""

    loss: NotRequired[float | None]
    last_loss: NotRequired[float | None]
    best_loss: NotRequired[float | None]
    validated_step: NotRequired[int | None]


class _Saved(TypedDict):
    progress: _Progress


def main(config: InspectConfig) -> int:
    """Print the page.

    Raises:
        UsageError: the path is none of what is shown, or a cache that is not finished or damaged.
    """
    setup_logging()
    if config.hardware:
        show("hardware", hardware(), config.json)
        return 0
    if config.local:
        rows, total = listing()
        facts = {"folder": str(home()), "bytes": total, "caches": rows}
        show("", facts, True) if config.json else show_page(inspect_pages.local_page(facts))
        return 0
    assert config.path is not None
    address = parse_address(config.path)
    path, kind = config.path, "cache" if address else _kind(config.path)
    refuse(config.watch and kind != "run", f"--watch is for runs; {path} is a {kind}")
    if config.watch:
        return _watch(path)
    with _as_written(path):
        facts, page = _PAGES[kind](path) if address is None else _remote(address)
        if config.json or page is None:
            show(f"{kind} {path}", facts, config.json)
        else:
            show_page(list(page))
    return 0


def _kind(path: Path) -> str:
    """What a path is. UsageError: nothing of ours."""
    if path.name.endswith(".h5") and path.is_file() and cache_format.SHARD_NAME.fullmatch(path.stem):
        return "shard"
    if path.suffix == ".toml" and path.is_file():
        return "spec"
    if not path.exists() and str(path) in {**shipped("students"), **shipped("teachers")}:
        return "spec"
    is_folder = (
        path.is_dir() and not (path / cache_format.MANIFEST).exists() and any(inspect_pages.folder_of(path).values())
    )
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
    """Turn an error about what a stranger wrote into a UsageError."""
    try:
        yield
    except (UsageError, RunError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"{path} is not what kdtrain writes ({error!r}); see whether --json shows it") from None


def _watch(path: Path) -> int:
    """Print how a run is doing until it ends, every ten seconds."""
    before: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            with _as_written(path):
                record = RunRecord.read(path, inspect_pages.TAIL)
                line, trains = inspect_pages.watch_line(path, record)
                lines = [line, *(inspect_pages.health_lines(path, record) if trains else ())]
            show_page([lines[0], *(each for each in lines[1:] if each not in before)])
            before = lines
            if not trains:
                break
            time.sleep(10.0)
    return 0


def hardware() -> dict[str, Any]:
    """Devices, number formats and compilers of this machine, with the reason where something is missing."""
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
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        properties = torch.cuda.get_device_properties(number)
        bf16 = "bf16" if has_bf16(device) else "no bf16"
        table[f"cuda:{number}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {bf16}"
    return table


_Found = tuple[dict[str, Any], Iterator[inspect_pages.Part] | None]
"""What `--json` prints, and the page; None: a table of the same."""


def _cache(path: Path) -> _Found:
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    facts = _cache_facts(path, manifest)
    return facts, cache_page(path, facts, manifest)


def _remote(address: Address) -> _Found:
    """A cache elsewhere, of which the manifest alone is fetched."""
    remote = open_remote(address, limit=math.inf)
    facts = {"from": str(remote.address)} | _cache_facts(remote.folder, remote.manifest)
    missing = {split: len(remote.missing(split)) for split in remote.manifest.splits}
    return facts | {"shards not here": missing}, cache_page(str(address), facts, remote.manifest)


def _cache_facts(path: Path, manifest: Manifest) -> dict[str, Any]:
    settings = manifest.settings
    codec = {name: value for name, value in settings.codec.to_json().items() if value not in (0, [], ())}
    return {
        "digest": manifest.digest,
        "teacher": settings.teacher,
        "data": settings.data,
        "codec": codec,
        "tail rule": _tail_rule(settings.codec),
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
        **({"weights_cost": manifest.weights_cost} if manifest.weights_cost else {}),
        **({"generated": manifest.generated} if manifest.generated else {}),
        **({"text_counts": manifest.text_counts} if manifest.text_counts else {}),
        **({"origin": manifest.origin} if manifest.origin else {}),
        **({"parents": manifest.parents} if manifest.parents else {}),
        "versions": manifest.versions,
        **_aside(path.resolve()),
    }


def _tail_rule(codec: CodecSpec) -> str | None:
    """The default tail rule of `distill` for this cache, and its alternative; None without a tail."""
    if codec.kind != "sparse":
        return None
    used = resolve_tail("ghost", codec.num_samples)
    return f"{used} by default, or --tail control-variate" if codec.num_samples and codec.top_k else used


def _run(path: Path) -> _Found:
    facts = _run_facts(path)

    def page() -> Iterator[inspect_pages.Part]:  # --json needs none of the logs, which may be unreadable
        yield from inspect_pages.run_page(path, facts, RunRecord.read(path, inspect_pages.TAIL))

    return facts, page()


def _shard(path: Path) -> _Found:
    path = path.absolute()
    try:
        return inspect_pages.shard_facts(path, read_sidecar(path.parents[1], path.stem)), None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: the record beside it cannot be read ({error}); run kdtrain verify") from None


def _model(path: Path) -> _Found:
    try:
        return inspect_pages.model_facts(path), None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a model folder: {error}") from None


def _folder(path: Path) -> _Found:
    found = inspect_pages.folder_of(path)
    caches = []
    for each in found["caches"]:
        with contextlib.suppress(UsageError, RunError):  # unfinished or damaged: inspect it alone to read why
            caches.append((each, read_manifest(each)))
    facts = inspect_pages.folder_facts(found["runs"], caches)
    return facts, inspect_pages.folder_page(path, facts)


def _run_facts(path: Path) -> dict[str, Any]:
    store = Store(path / "checkpoints")
    environment = path / "environment.json"
    rows = {entry.name: _row(store, entry) for entry in store.entries(apart=True)}
    rows = {name: row for name, row in rows.items() if store.path(name).exists()}  # else pruned meanwhile
    result = read_result(path)
    caches: dict[str, Any] = {}
    try:
        described = read_json(environment, dict[str, Any])
        student, caches = described["student"], {"caches": described["caches"]} if "caches" in described else {}
    except (OSError, ValueError, KeyError):
        student = f"{environment.name} cannot be read"
    return {
        "student": student,
        **caches,
        "ended": None if result is None else {**result},
        "exported": str(path / "student") if (path / "student").is_dir() else None,
        **{link: target for link in tiers.LINKS if (target := store.linked(link)) is not None},
        "checkpoints": rows,
        "checkpoints in all (MiB)": _mib([*map(store.path, rows)]),
        **_aside(path.resolve()),
    }


def _aside(path: Path) -> dict[str, Any]:
    """Files and folders that were set aside beside and inside a run or a cache: MiB by path, and in all."""
    folders = [path, path / "checkpoints", path / "shards"]
    aside = [each for each in aside_in(path.parent) if each.name.startswith(f"{path.name}.")]
    aside += [each for folder in folders for each in aside_in(folder)]
    if not aside:
        return {}
    table = {os.path.relpath(each, path): _mib([each]) for each in aside}
    return {"set aside (MiB)": {**table, "in all": _mib(aside)}}


def _mib(paths: list[Path]) -> float:
    """MiB of files and folders; a file with several names counts once, and links are not followed."""
    sizes: dict[tuple[int, int], int] = {}
    for path in paths:
        for each in [path, *(Path(inside, name) for inside, _, names in os.walk(path) for name in names)]:
            try:
                status = each.lstat()
            except FileNotFoundError:  # removed by a run that is training
                continue
            if not stat.S_ISDIR(status.st_mode):
                sizes[status.st_dev, status.st_ino] = status.st_size
    return round(sum(sizes.values()) / 2**20, 1)


def _row(store: Store, entry: tiers.Entry) -> dict[str, Any]:
    """The row of a checkpoint: `loss` is the last training loss, `best_loss` the lowest validation loss until then.

    `validation_loss` is that of its own step, if it was validated; `written` is in local time.
    """
    path = store.path(entry.name)
    progress = _Progress()
    if (damage := problem(path)) is None:
        try:
            progress = typed(read_state(path), _Saved)["progress"]
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
        "MiB": _mib([path]),
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
    teaches = str(path) in shipped("teachers") or path.parent.name == "teachers"
    spec = read_spec(str(path), "teachers" if teaches else "students")
    facts = {name: value for name, value in vars(spec).items() if value not in (None, (), {}, False)}
    if spec.lora is not None:
        facts["lora"] = {name: value for name, value in vars(spec.lora).items() if value not in (None, False)}
    return facts, _recipe(shlex.quote(str(path)), spec, teaches)


def _recipe(word: str, spec: ModelSpec, teaches: bool) -> Iterator[inspect_pages.Part]:
    """What the recipe of a teacher or a student says."""
    begins = {"scratch": "fresh weights", "teacher-layers": f"layers {list(spec.layers)} of {spec.teacher}"}
    config = dict(spec.config or {})
    kind = f"a {config.pop('model_type')}, " if config else ""
    source = f" of {spec.source}" if spec.source else ""
    yield f"{word}: {spec.name}, {kind}{begins.get(spec.init, 'the weights')}{source}"
    if config:
        yield ", ".join(f"{name} {value}" for name, value in config.items())
    if spec.lora is not None:
        yield f"trains {spec.lora}"
    if spec.tokenizer:
        yield f"tokenizer {spec.tokenizer}"
    yield f"{f'{spec.dtype}, ' if teaches else ''}attention {spec.attention}"
    if teaches:
        yield f"Next: kdtrain cache-teacher --teacher {word} --data SOURCE --out cache/NAME"
    else:
        yield f"Next: kdtrain distill --cache CACHE --student {word} --out runs/NAME"


_PAGES: dict[str, Callable[[Path], _Found]] = {
    "spec": _spec,
    "cache": _cache,
    "run": _run,
    "checkpoint": lambda path: (read_checkpoint(lambda: checkpoint_at(path), _loaded), None),
    "shard": _shard,
    "model": _model,
    "folder": _folder,
}
