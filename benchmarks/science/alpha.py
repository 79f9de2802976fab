"""Alpha by withheld text, in eleven regimes, on a test split that nothing read: the record of docs/objective.md.

`benchmarks/science/alpha.toml` says what to run first. `python -m benchmarks.science.alpha [--runs runs/alpha]` then
measures the best student of each run, and its last one where that is another, and writes
benchmarks/results/alpha.json. Other sweeps with the same caches and names of arms may stand in further `--runs`.
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT, write
from benchmarks.harness.command import environment, kdtrain
from benchmarks.harness.machine import commit

SWEEP = Path(__file__).with_suffix(".toml")


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, nargs="+", default=[ROOT / "runs" / "alpha"], help="folders of sweeps")
    parser.add_argument("--sequences", type=int, default=256, help="of the test split")
    parser.add_argument("--result", type=Path, default=RESULTS / "alpha.json")
    asked = parser.parse_args()
    caches, folders, rows = tomllib.loads(SWEEP.read_text())["caches"], list[Path](), list[dict[str, Any]]()
    for name, cache in caches.items():
        ended = sorted(each.parent for folder in asked.runs for each in folder.glob(f"{name}-*/seed-*/result.json"))
        text = [cache["data"], "--split", "test", "--seq-len", "256", "--num-sequences", str(asked.sequences)]
        rows += _measured(name, ended, [*text, "--precision", "bf16"], cache["teacher"])
        folders += ended
    shape = {"student": "stdlib-1m", "batch_size": 8, "seq_len": 256, "lr": 2e-3, "test_sequences": asked.sequences}
    record = {"command": f"kdtrain sweep {SWEEP.relative_to(ROOT)}", "commit": commit(), "settings": shape}
    write(asked.result, {**record, "environment": environment(folders[0]), "regimes": caches, "runs": rows})
    return 0


def _measured(regime: str, folders: list[Path], text: list[str], teacher: str) -> list[dict[str, Any]]:
    """Measure the runs of one regime; nothing where there are none."""
    if not folders:
        return []
    results = {each: json.loads((each / "result.json").read_text()) for each in folders}
    best, newest = ({each: each / "checkpoints" / name for each in folders} for name in ("best", "latest"))
    last = [each for each in folders if best[each].resolve() != newest[each].resolve()]
    students = [str(each) for each in folders] + [str(newest[each]) for each in last]
    found = kdtrain("evaluate", "--student", *students, "--data", *text)["students"]
    beside = kdtrain("evaluate", "--student", str(folders[0]), "--data", *text, "--teacher", teacher)["students"][0]
    ends, rows = dict(zip(last, found[len(folders) :], strict=True)), list[dict[str, Any]]()
    for folder, own in zip(folders, found[: len(folders)], strict=True):
        end, result = ends.get(folder, own), results[folder]
        row = {"regime": regime, "alpha": folder.parent.name.removeprefix(f"{regime}-"), "seed": int(folder.name[5:])}
        row |= {"loss": own["loss"], "ece": own["ece"], "step": own["step"], "teacher": beside["teacher_loss"]}
        row |= {"last_loss": end["loss"], "last_ece": end["ece"], "steps": end["step"]}
        row |= {name: result[name] for name in ("alpha_mean", "alpha_last", "best_validation_loss")}
        rows.append({name: round(each, 5) if isinstance(each, float) else each for name, each in row.items()})
    return rows


if __name__ == "__main__":
    sys.exit(main())
