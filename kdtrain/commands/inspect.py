"""`kdtrain inspect`: shows a cache, a run or a checkpoint as a table, or the capabilities of this machine."""

import contextlib
import os
import platform
import stat
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from kdtrain.cache.codec import CodecSpec
from kdtrain.cache.manifest import check_sizes, read_manifest
from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.store import MANIFEST, Store, checkpoint_at, problem, read_checkpoint
from kdtrain.commands.result import read_result
from kdtrain.commands.verify import damage_of, kind_of
from kdtrain.config import InspectConfig
from kdtrain.errors import RunError, UsageError
from kdtrain.files import aside_in, read_json
from kdtrain.monitor.progress import setup_logging
from kdtrain.monitor.tables import show
from kdtrain.objective.tails import resolve_tail
from kdtrain.precision.backends import capabilities
from kdtrain.precision.modes import has_bf16, why_not_compile
from kdtrain.training.state import load_saved, read_saved


def main(config: InspectConfig) -> int:
    """Print the table.

    Raises:
        UsageError: the path is neither a cache nor a run nor a checkpoint, or the cache is not finished or damaged.
    """
    setup_logging()
    if config.hardware:
        show("hardware", hardware(), config.json)
        return 0
    assert config.path is not None
    kind = kind_of(config.path)
    table = {"cache": _cache, "run": _run, "checkpoint": _checkpoint}[kind](config.path)
    if kind == "cache" and not config.json:
        try:
            table = _with_lines(table)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"the fidelity in {config.path} is not what kdtrain writes ({error!r}); use --json"
            ) from None
    show(f"{kind} {config.path}", table, config.json)
    return 0


def hardware() -> dict[str, Any]:
    """Devices, number formats and compilers of this machine, with the reason where something is missing."""
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


def _cache(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    check_sizes(path, manifest)
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
        "versions": manifest.versions,
        **_aside(path.resolve()),
    }


def _tail_rule(codec: CodecSpec) -> str | None:
    """The default tail rule of `distill` for this cache, and its alternative; None without a tail."""
    if codec.kind != "sparse":
        return None
    used = resolve_tail("ghost", codec.num_samples)
    return f"{used} by default, or --tail control-variate" if codec.num_samples and codec.top_k else used


def _with_lines(table: dict[str, Any]) -> dict[str, Any]:
    """The table of a cache with its fidelity as text, by temperature; `--json` prints the numbers."""
    fidelity = table["fidelity"]
    if not fidelity:
        return table
    rows: dict[str, Any] = {}
    for name, value in table.items():
        if name != "fidelity":
            rows[name] = value
            continue
        sample = fidelity["sample"]
        rows["fidelity"] = f"{sample['tokens']:,} tokens of {fidelity['split']}, student: {fidelity['student']}"
        rows |= {f"fidelity, {t}": _lines(each) for t, each in fidelity.items() if t.startswith("T=")}
        worst = max(fidelity["log_partition_error"], key=lambda row: row["worst"])
        rows["error of log Z"] = f"at most {worst['worst']:.4f} nats, at T={worst['T']:.3g}"
    return rows


def _lines(fidelity: dict[str, Any]) -> list[str]:
    """KL(full || cache), then the gradient of each tail rule against the full one."""
    bucket, spread = fidelity["kl_bucket"], fidelity["kl_spread"]
    lines = [f"KL(full || cache): {bucket:.2g} (tail as one bucket), {spread:.3f} (spread evenly)"]
    lines.append("angle to the full gradient x norm ratio, of tokens and of their mean:")
    for rule, each in fidelity["gradient"].items():
        token, mean = (f"{each[f'{of}_angle']:.1f}° x {each[f'{of}_norm']:.3g}" for of in ("token", "mean"))
        lines.append(f"{rule}: {token}, mean {mean}")
    return lines


def _run(path: Path) -> dict[str, Any]:
    store = Store(path / "checkpoints")
    environment = path / "environment.json"
    rows = {entry.name: _row(store, entry) for entry in store.entries(apart=True)}
    rows = {name: row for name, row in rows.items() if store.path(name).exists()}  # else pruned meanwhile
    result = read_result(path)
    try:
        student = read_json(environment, dict[str, Any])["student"]
    except (OSError, ValueError, KeyError):
        student = f"{environment.name} cannot be read"
    return {
        "student": student,
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
    progress: dict[str, Any] = {}
    if (damage := problem(path)) is None:
        try:
            progress = read_saved(path)["progress"]
        except (RunError, OSError) as error:
            damage = str(error)
    written = None
    with contextlib.suppress(OSError):
        written = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime).isoformat(" ", "seconds")
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


def _checkpoint(named: Path) -> dict[str, Any]:
    return read_checkpoint(lambda: checkpoint_at(named), _loaded)


def _loaded(path: Path) -> dict[str, Any]:
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
