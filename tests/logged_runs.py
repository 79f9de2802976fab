"""Folders as `distill` leaves them, written line by line: runs whose numbers a test chooses. Reads what W&B has."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DIGEST = "ab" * 32


def write_run(folder: Path, final: float = 2.0, seed: int = 0, ended: bool = True, **options: Any) -> Path:
    """Write a run of 40 steps of 100 tokens, validated at each tenth, whose validation loss falls to `final`.

    options: of the section objective, but for `cache` and `steps`.
    """
    folder.mkdir(parents=True)
    run = {"student": "students/s.toml", "out": str(folder), "cache": options.pop("cache", "cache/c"), "seed": seed}
    run["steps"] = options.pop("steps", 40)
    tables = {"run": run, "objective": options}
    text = "".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )
    (folder / "config.toml").write_text(text)
    environment = {
        "python": "3",
        "platform": "Linux",
        "libraries": {"kdtrain": "0.2", "torch": "2"},
        "student": {"name": "s", "parameters": 1_053_824},
        "cache": DIGEST,
        "device": "cpu",
        "mode": "fp32",
        "ranks": 1,
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    lines: list[dict[str, Any]] = []
    for step in range(41):
        speed = {"tok/s_last": 50.0} if step > 1 else {}
        if step:
            numbers = {"loss": 5 - step / 20, "loss_avg": 5.0, "tokens": 100, "T": 1.0, "quantized": float(step <= 10)}
            lines.append({"step": step, **numbers, **speed})
        if step % 10 == 0:
            names = {"loss": final + (40 - step) / 40, "kl": 1.0, "ece": 0.05, "accuracy": 0.5, "teacher_loss": 1.5}
            lines.append({"step": step, **{f"validation/{name}": value for name, value in names.items()}})
    write_lines(folder / "metrics.jsonl", lines)
    if ended:
        result = {
            "stop_reason": "done",
            "step": 40,
            "steps": 40,
            "best_validation_loss": final,
            "peak_memory_mb": 512.0,
        }
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Append records to a log."""
    with open(path, "a") as file:
        file.writelines(json.dumps(each) + "\n" for each in lines)


def write_three(parent: Path) -> list[Path]:
    """Write two seeds of one setup, and a run of another that was resumed, rolled back and switched."""
    found = [write_run(parent / f"a{seed}", 2 + seed / 100, seed) for seed in range(2)]
    found.append(write_run(parent / "b", 2.9, alpha=0.5))
    events = [
        {"event": "resume", "level": "info", "step": 10},
        {"event": "rollback", "level": "warning", "step": 20, "message": "rolled back to step-00000020"},
        {"event": "switch", "level": "info", "step": 30, "mode": "bf16"},
    ]
    write_lines(found[-1] / "events.jsonl", events)
    for folder in (found[0], found[-1]):
        texts = [{"step": step, "prompt": "def f(", "greedy": f"{folder.name} at {step}"} for step in (20, 40)]
        write_lines(folder / "samples.jsonl", texts)
    return found


def wandb_records(folder: Path, ended: bool = False) -> list[list[Any]]:
    """Read what the package wandb wrote offline for a run, a list of its records for each start, oldest first.

    ended: wait until each has its end, which a process of the package writes, later on a busy machine.
    """
    for _ in range(200):
        found = [list(_records(path.read_bytes())) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]
        if not ended or (found and all(any(each.HasField("exit") for each in records) for records in found)):
            break
        time.sleep(0.1)
    return found


def wandb_history(records: list[Any]) -> list[dict[str, Any]]:
    """Return what each `log` of a start gave, by its name."""
    logged = [each.history.item for each in records if each.HasField("history")]
    return [{each.key or ".".join(each.nested_key): json.loads(each.value_json) for each in items} for items in logged]


def _records(data: bytes) -> Iterator[Any]:
    """Read the records of a log in LevelDB's format, behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, part = 7, b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(part)
            part = b""
